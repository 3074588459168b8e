"""verl_patches/transfer_queue_start.py: VERL waits for its queue first of all, the patch puts the start off; gate.

How our trainer begins and ends it: tests/verl_plugin/task_runner/test_run_trainer.py.
"""

import inspect
import types

import pytest
from omegaconf import OmegaConf
from patch_cases import OUTSIDE, asked

from verl_patches import transfer_queue_start
from verl_patches.deferred import Deferred


@pytest.fixture
def queue(monkeypatch):
    """A module like TransferQueue, with the patch; `started` has the configs it was started with."""
    monkeypatch.setattr(transfer_queue_start, "start", Deferred("queue"))
    module = types.ModuleType("transfer_queue")
    module.started = []
    module.init = lambda conf=None: module.started.append(conf) or "final"
    module.interface = types.SimpleNamespace(_maybe_create_tq_client=lambda conf=None: "client")
    transfer_queue_start.apply(module)
    return module


def config(mode: str):
    return OmegaConf.create({"trainer": {"v1": {"trainer_mode": mode}}, "transfer_queue": {"enable": True}})


def test_defect_is_still_there():
    from verl.trainer import main_ppo

    source = inspect.getsource(main_ppo)
    assert source.index("tq.init(config.transfer_queue)") < source.index("trainer_cls(config=config)")


@pytest.mark.parametrize("mode", ["megatrain_sync", "megatrain_colocate_async"])
def test_patch_mends_it(queue, mode):
    conf = config(mode).transfer_queue
    assert queue.init(conf) is conf and queue.started == []
    transfer_queue_start.start.finish()
    assert queue.started == [conf]


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "of another plug-in"])
def test_the_queue_of_other_runs_starts_as_ever(queue, mode):
    conf = config(mode).transfer_queue
    assert queue.init(conf) == "final" and queue.started == [conf]
    alone = OmegaConf.create({"enable": True})
    assert queue.init(alone) == "final" and queue.started[-1] is alone


def test_another_run_of_a_task_runner_that_had_one_of_ours(queue):
    """Its start comes after the one that was put off, and at once."""
    first, second = config("megatrain_sync").transfer_queue, config("sync").transfer_queue
    queue.init(first)
    assert queue.init(second) == "final" and queue.started == [first, second]


def test_a_process_that_joins_the_queue_does_so_at_once(queue):
    assert queue.init() == "final" and queue.started == [None]


def test_who_uses_the_queue_early_waits_for_it(queue):
    conf = config("megatrain_sync").transfer_queue
    queue.init(conf)
    assert queue.interface._maybe_create_tq_client() == "client" and queue.started == [conf]


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="init"):
        transfer_queue_start.apply(types.ModuleType("transfer_queue"))


def test_the_real_queue_has_the_calls():
    import transfer_queue
    import verl  # noqa: F401  (loads the plug-in)

    from verl_patches.wrap import patches_of

    name = "verl_patches.transfer_queue_start"
    assert patches_of(transfer_queue.init) == patches_of(transfer_queue.interface._maybe_create_tq_client) == (name,)
    for use in ("kv_batch_get", "kv_batch_put", "kv_list", "kv_clear"):
        assert "_maybe_create_tq_client()" in inspect.getsource(getattr(transfer_queue.interface, use)), use


@pytest.mark.parametrize("version", OUTSIDE)
def test_nothing_outside_the_gate(version):
    assert transfer_queue_start.MODULE not in asked(version)
    assert transfer_queue_start.MODULE not in asked("0.9.1", TransferQueue="0.2.0")
    assert transfer_queue_start.MODULE in asked("0.9.1")
