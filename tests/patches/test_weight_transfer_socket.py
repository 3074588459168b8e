"""verl_patches/weight_transfer_socket.py with stand-ins for vLLM's side; tests/with_vllm has the real one."""

import importlib.util
import os
import types
from pathlib import Path

import pytest
import ray
from patch_cases import OUTSIDE, asked

from verl_patches import ours
from verl_patches.weight_transfer_socket import HOOKS, VARIABLE, apply_to_sender, apply_to_server

JOB = "01000000"
MINE = types.SimpleNamespace(custom=ours.marked({"of the user": 1}))
OTHERS = types.SimpleNamespace(custom={"of the user": 1})


@pytest.fixture
def on_node(monkeypatch):
    """on_node(id): from now on this process is on that node of a cluster whose first job it is."""
    monkeypatch.setenv(VARIABLE, "")

    def be_on(node: str) -> None:
        context = types.SimpleNamespace(get_job_id=lambda: JOB, get_node_id=lambda: node)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)

    return be_on


def sender_handle(patched: bool, *, replica: int = 0, config=MINE) -> str:
    """The socket that VERL's adapter in the trainer's worker binds."""

    class ServerAdapter:
        def __init__(self, config, replica_rank):
            self.config = config
            job = ray.get_runtime_context().get_job_id()
            self.zmq_handle = f"ipc:///tmp/rl-colocate-zmq-{job}-replica-{replica_rank}-rank-0.sock"

    module = types.SimpleNamespace(ServerAdapter=ServerAdapter)
    if patched:
        apply_to_sender(module)
    return module.ServerAdapter(config, replica_rank=replica).zmq_handle


def receiver_handle(patched: bool, config=MINE) -> str:
    """The socket to which the engine's worker, a child of VERL's server, connects."""

    class vLLMHttpServer:
        def __init__(self, config):
            self.config = config
            os.environ[VARIABLE] = ray.get_runtime_context().get_job_id()

    module = types.SimpleNamespace(vLLMHttpServer=vLLMHttpServer)
    if patched:
        apply_to_server(module)
    module.vLLMHttpServer(config=config)
    return f"ipc:///tmp/rl-colocate-zmq-{os.environ[VARIABLE]}-replica-0-rank-0.sock"


def test_defect_is_still_there(on_node):
    folder = Path(importlib.util.find_spec("verl").submodule_search_locations[0]) / "workers/rollout/vllm_rollout"
    line = 'self.zmq_handle = f"ipc:///tmp/rl-colocate-zmq-{job_id}-replica-{self.replica_rank}-rank-{local_rank}.sock"'
    assert line in (folder / "vllm_rollout.py").read_text()
    assert 'job_id = os.environ.get("VERL_RAY_JOB_ID", "0")' in (folder / "utils.py").read_text()
    server = (folder / "vllm_async_server.py").read_text()
    assert 'os.environ["VERL_RAY_JOB_ID"] = ray.get_runtime_context().get_job_id()' in server
    handles = []
    for node in ("a" * 56, "b" * 56):
        on_node(node)
        handles.append(sender_handle(False))
    assert handles[0] == handles[1], "of two clusters on one machine"


def test_patch_mends_it(on_node):
    handles = []
    for node in ("a" * 56, "a" * 15 + "b" * 41):
        on_node(node)
        handles.append(sender_handle(True))
        assert receiver_handle(True) == handles[-1]
        assert JOB in handles[-1] and len(handles[-1].removeprefix("ipc://")) < 107
    assert handles[0] != handles[1]
    assert sender_handle(True, replica=1) != handles[1]


def test_rollouts_of_other_strategies_are_left_alone(on_node):
    on_node("a" * 56)
    assert sender_handle(True, config=OTHERS) == sender_handle(False)
    assert receiver_handle(True, config=OTHERS) == receiver_handle(False)


def test_a_run_of_ours_whose_driver_prepared_nothing_is_told(on_node, monkeypatch, caplog):
    on_node("a" * 56)
    monkeypatch.setattr(ours, "_engine_lives_here", True)
    assert sender_handle(True, config=OTHERS) == sender_handle(False, config=OTHERS)
    assert "validate_config" in caplog.text


def test_another_form_of_the_name_raises(on_node):
    on_node("a" * 56)

    class ServerAdapter:
        config = MINE

        def __init__(self):
            self.zmq_handle = "ipc:///tmp/other.sock"

    module = types.SimpleNamespace(ServerAdapter=ServerAdapter)
    apply_to_sender(module)
    with pytest.raises(RuntimeError, match=r"01000000.*ipc:///tmp/other\.sock"):
        module.ServerAdapter()


def test_missing_names_raise():
    for module, apply in HOOKS.items():
        with pytest.raises(AttributeError):
            apply(types.ModuleType(module))


@pytest.mark.parametrize("version", OUTSIDE)
def test_nothing_outside_the_gate(version):
    assert set(HOOKS).isdisjoint(asked(version))
    hooks = asked("0.9.1")
    assert hooks[next(iter(HOOKS))] is apply_to_sender and set(HOOKS) <= set(hooks)
