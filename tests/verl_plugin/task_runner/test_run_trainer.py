"""Our trainers: what they start while VERL waits, the phases they mark, what they watch; the rest is VERL's."""

import importlib.util
import inspect
import threading
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import verl  # noqa: F401  (loads the plug-in)
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls
from verl_cases import OURS, RUN, composed

from megatrain_rl.verl_plugin import startup_times
from megatrain_rl.verl_plugin.task_runner import trainer
from megatrain_rl.verl_plugin.task_runner.failures import told_again
from megatrain_rl.verl_plugin.task_runner.trainer import RunOfOurs
from verl_patches import transfer_queue_start
from verl_patches.deferred import Deferred
from verl_patches.wrap import patches_of


def config(rollout: str = "vllm", mode: str = "megatrain_sync"):
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"name": rollout, "calculate_log_probs": True}},
            "algorithm": {"rollout_correction": {"bypass_mode": False}},
            "trainer": {"v1": {"trainer_mode": mode}, "default_local_dir": "out"},
            "transfer_queue": {"enable": True},
        }
    )


class Blocked:
    """Something that takes long: begins when it is called, ends when it may."""

    def __init__(self):
        self.began, self.may_end, self.ended = (threading.Event() for _ in range(3))
        self.arguments, self.error = [], None

    def __call__(self, *arguments):
        self.arguments.append(arguments)
        self.began.set()
        assert self.may_end.wait(20)
        self.ended.set()
        if self.error is not None:
            raise self.error


class TaskRunner:
    """VERL's order: the queue, data, the trainer's workers and model, reward workers, rollout engine, checkpoint."""

    def __init__(
        self,
        monkeypatch,
        *,
        config,
        trainer_error: Exception | None = None,
        uses_queue_early: bool = False,
        data_error: Exception | None = None,
        reference: bool = True,
    ):
        self.reference = reference
        self.events: list[str] = []
        self.server, self.queue = Blocked(), Blocked()
        monkeypatch.setattr(trainer.importlib, "import_module", self.server)
        monkeypatch.setattr(transfer_queue_start, "start", Deferred("queue"))
        monkeypatch.setattr(trainer, "_watch_memory", lambda: None)
        self.data_error = data_error
        self.config, self.trainer_error, self.uses_queue_early = config, trainer_error, uses_queue_early
        self.tq = self._queue()
        for _ in range(2):
            transfer_queue_start.apply(self.tq)
        self.trainer_class = type("Trainer", (RunOfOurs, self._verls_trainer()), {})

    def run(self):
        self.tq.init(self.config.transfer_queue)
        try:
            made = self.trainer_class(self.config)
            made.init()
        finally:
            self.tq.close()
        return made

    def state(self) -> str:
        names = {"queue": self.queue, "server": self.server}
        return ", ".join(
            f"{name} {'ended' if it.ended.is_set() else 'begun' if it.began.is_set() else 'not begun'}"
            for name, it in names.items()
        )

    def init_model(self) -> None:
        """VERL's wait for the trainer's process."""
        assert self.queue.began.wait(20)
        if self.config.actor_rollout_ref.rollout.name == "vllm":
            assert self.server.began.wait(20)
        self.events.append(f"model: {self.state()}")
        self.queue.may_end.set()
        self.server.may_end.set()
        if self.trainer_error is not None:
            raise self.trainer_error

    def _queue(self) -> types.ModuleType:
        this = self
        module = types.ModuleType("transfer_queue")
        module.interface = types.SimpleNamespace(_maybe_create_tq_client=lambda conf=None: "client")

        def init(conf=None):
            this.queue(conf)
            module.interface._maybe_create_tq_client(conf)
            return "final"

        module.init, module.close = init, lambda: this.events.append(f"close: {this.state()}")
        return module

    def _verls_trainer(self) -> type:
        this, events = self, self.events

        class PPOTrainer:
            def __init__(self, config):
                self.config = config

            def init(self):
                self._setup()

            def _setup(self):
                events.append(f"data: {this.state()}")
                if this.data_error is not None:
                    raise this.data_error
                if this.uses_queue_early:
                    this.queue.may_end.set()
                    assert this.tq.interface._maybe_create_tq_client() == "client"
                    events.append(f"used: {this.state()}")
                self.resource_pool_to_cls = {}
                events.append("workers")
                self.actor_rollout_wg = SimpleNamespace(init_model=this.init_model)
                self.actor_rollout_wg.init_model()
                if this.reference:  # VERL assigns it only where the actor's process is asked for one
                    self.ref_policy_wg = self.actor_rollout_wg
                events.append(f"rewards: {this.state()}")
                self.reward_loop_manager = "rewards"
                self.llm_server_manager = "servers"

        return PPOTrainer


@pytest.mark.parametrize("reference", [True, False])
def test_both_go_on_beneath_the_wait_for_the_trainer(monkeypatch, reference):
    runner = TaskRunner(monkeypatch, config=config(), reference=reference)
    runner.run()
    assert runner.events == [
        "data: queue not begun, server not begun", "workers", "model: queue begun, server begun",
        "rewards: queue ended, server ended", "close: queue ended, server ended",
    ]  # fmt: skip
    assert runner.queue.arguments == [(runner.config.transfer_queue,)]
    assert runner.server.arguments == [("verl.workers.rollout.vllm_rollout.vllm_async_server",)]


def test_a_run_without_vllm_imports_none(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config(rollout="embedded"))
    runner.run()
    assert runner.events[-2] == "rewards: queue ended, server not begun"


def test_who_uses_the_queue_early_waits_for_it(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config(), uses_queue_early=True)
    runner.run()
    assert runner.events[:2] == ["data: queue not begun, server not begun", "used: queue ended, server not begun"]
    assert len(runner.queue.arguments) == 1


def test_an_error_of_the_import_is_left_to_verl(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config())
    runner.server.error = ImportError("no vllm")
    runner.run()
    assert runner.events[-2] == "rewards: queue ended, server ended"


@pytest.mark.parametrize("uses_queue_early", [False, True])
def test_an_error_of_the_queue_is_told_before_it_is_used(monkeypatch, uses_queue_early):
    runner = TaskRunner(monkeypatch, config=config(rollout="embedded"), uses_queue_early=uses_queue_early)
    runner.queue.error = RuntimeError("no storage")
    with pytest.raises(RuntimeError, match="no storage"):
        runner.run()
    assert runner.events[-1].startswith("close") and not any("used" in e or "rewards" in e for e in runner.events)


def test_the_trainers_own_error_is_the_one_that_is_told(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config(), trainer_error=ValueError("the trainer's error"))
    runner.queue.error = RuntimeError("no storage")
    with pytest.raises(ValueError, match="the trainer's error"):
        runner.run()
    assert runner.events[-1] == "close: queue ended, server ended"


def test_an_error_before_the_wait_starts_nothing(monkeypatch):
    """It is told at once, not after 20 s of importing what nobody will use."""
    runner = TaskRunner(monkeypatch, config=config(), data_error=ValueError("no such file"))
    with pytest.raises(ValueError, match="no such file"):
        runner.run()
    assert runner.events == ["data: queue not begun, server not begun", "close: queue not begun, server not begun"]


def test_phases_are_told_once_training_begins(monkeypatch, capsys):
    """Each lasts until VERL has what the next one needs."""
    now = 1000.0
    monkeypatch.setattr(startup_times.time, "time", lambda: now)
    monkeypatch.setenv(startup_times.STARTED_VARIABLE, str(now - 256))
    monkeypatch.setattr(trainer, "_watch_memory", lambda: None)
    monkeypatch.setattr(transfer_queue_start, "start", Deferred("queue"))

    def pass_(seconds):
        nonlocal now
        now += seconds

    class PPOTrainer:
        def __init__(self, config):
            self.config = config
            pass_(1)

        def init(self):
            self._setup()
            pass_(32)

        def _setup(self):
            self.resource_pool_to_cls = {}
            pass_(2)
            self.actor_rollout_wg = SimpleNamespace(init_model=lambda: pass_(64))
            self.actor_rollout_wg.init_model()
            pass_(4)
            self.reward_loop_manager = "rewards"
            pass_(8)
            self.llm_server_manager = "servers"
            pass_(16)

        def fit(self, agent_loops):
            pass_(1000)

    made = type("Trainer", (RunOfOurs, PPOTrainer), {})(config("embedded"))
    made.init()
    pass_(128)
    made.fit("agent loops")
    assert made._times.phases_s() == {
        "Ray and the task runner": 256, "tokenizer, data": 1, "worker process": 2, "trainer, GPU memory": 64,
        "reward workers": 4, "rollout engine": 8, "rest of the model, checkpoint": 16,
        "rest of the model, first weight sync": 32, "agent workers": 128,
    }  # fmt: skip
    told = capsys.readouterr().out
    assert told.startswith("start-up took 511.0 s: Ray and the task runner 256.0, ") and told.count("start-up") == 1


def test_verl_assigns_its_parts_in_this_order():
    """An attribute that VERL assigns shows how far it is, so its method must still assign them, once and in order."""
    source = inspect.getsource(PPOTrainer._setup)
    assigned = [f"self.{name}{':' if name == 'llm_server_manager' else ' ='} " for name in trainer._PHASES]
    places = [source.index(assignment) for assignment in assigned]
    assert places == sorted(places)
    for name in ("resource_pool_to_cls", "actor_rollout_wg", "reward_loop_manager"):
        assert source.count(f"self.{name} = ") == 1, name
    order = ["self.actor_rollout_wg.init_model()", "RewardLoopManager(", "LLMServerManager.create("]
    assert sorted(order, key=source.index) == order
    assert "self.logger = Tracking(" in inspect.getsource(PPOTrainer.fit)


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_verls_trainers_have_these_methods_from_their_base(mode):
    ours = {"__init__", "_setup", "init", "fit", "_build_replay_buffer"}
    ours |= {"_init_dataloader", "_balance_batch", "_val_metrics_update"}
    ours |= {"_compute_old_log_prob", "_compute_advantage", "_update_actor"}
    assert ours.isdisjoint(vars(get_trainer_cls(mode)))
    assert ours <= vars(PPOTrainer).keys() and ours <= vars(RunOfOurs).keys()


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_the_mode_is_verls_to_everything_else(mode):
    """Settings and metrics are looked up by it."""
    made = built(mode)
    assert made.trainer_mode == made.config.trainer.v1.trainer_mode == mode
    assert type(made).__mro__[2] is get_trainer_cls(mode)


def test_verls_own_trainers_are_not_changed():
    """The registry still has them, and of their functions only the one that keeps a run's mode VERL's is wrapped."""
    for mode in ("sync", "colocate_async", "separate_async"):
        cls = get_trainer_cls(mode)
        assert not issubclass(cls, RunOfOurs)
        wrapped = {
            name: patches_of(f) for owner in cls.__mro__[:-1] for name, f in vars(owner).items() if patches_of(f)
        }
        assert wrapped == {"__init__": ("verl_patches.trainer_mode",)}


def built(mode: str = "sync", *overrides: str):
    from megatrain_rl.verl_plugin.driver import prepare

    made_config = composed(*RUN, *OURS, f"trainer.v1.trainer_mode={mode}", "trainer.logger=[console]", *overrides)
    prepare.prepare(made_config)
    made = get_trainer_cls(made_config.trainer.v1.trainer_mode)(config=made_config)
    if made._memory is not None:
        made._memory.stop()
    return made


# ---- samples are taken when they are there, not up to two seconds later ----


def test_verl_alone_looks_every_two_seconds():
    parameters = inspect.signature(replay_buffer.ReplayBuffer.__init__).parameters
    assert parameters["poll_interval"].default == 2.0
    assert inspect.unwrap(replay_buffer.ReplayBuffer.__init__) is replay_buffer.ReplayBuffer.__init__


@pytest.mark.parametrize("mode, cls", [("sync", "ReplayBuffer"), ("colocate_async", "ReplayBufferAsync")])
def test_our_trainer_looks_often(mode, cls, monkeypatch):
    slept = []
    monkeypatch.setattr(replay_buffer.time, "sleep", slept.append)
    buffer = built(mode).replay_buffer
    assert type(buffer).__name__ == cls
    buffer._wait_for_next_poll("train", 0.0)
    assert slept == [trainer.POLL_SECONDS] and slept[0] <= 0.1


def test_a_buffer_of_the_users_own_is_left_alone(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer\nclass Mine(ReplayBuffer):\n    pass\n"
    )
    sampler = "trainer.v1.sampler.custom_sampler"
    buffer = built("sync", f"{sampler}.path={tmp_path}/mine.py", f"{sampler}.name=Mine").replay_buffer
    assert type(buffer).__name__ == "Mine" and buffer.poll_interval == 2.0


# ---- what is lost ----


class DataOfVerl:
    """What VERL's trainer does around data, with nothing behind it."""

    train, validation, parameter_sync_step = (1, 2), (1,), 1

    def __init__(self, config):
        self.config = config

    def _init_dataloader(self):
        self.train_dataset, self.val_dataset = list(self.train), list(self.validation)
        if not self.val_dataset:
            raise ValueError("batch_size should be a positive integer value, but got batch_size=0")

    def _balance_batch(self, batch, metrics):
        return batch

    def _val_metrics_update(self, sources, uids, infos, turns, expected_acc_counts=None):
        return {"val": len(uids)}


def with_data(monkeypatch, **changes):
    monkeypatch.setattr(trainer, "_watch_memory", lambda: None)
    more = {"algorithm": {}, "data": {"train_batch_size": 2, "truncation": "error", "filter_overlong_prompts": True}}
    more["data"] |= {"max_prompt_length": 4}
    more["actor_rollout_ref"] = {"rollout": {"n": 2, "prompt_length": 4}}
    return type("Trainer", (RunOfOurs, type("PPOTrainer", (DataOfVerl,), changes)), {})(OmegaConf.merge(config(), more))


def test_failed_answers_are_in_the_metrics_of_the_step(monkeypatch):
    made, metrics = with_data(monkeypatch), {"verl": 1}
    batch = SimpleNamespace(keys=["a_0_0", "a_1_0", "b_1_0"], tags=[{}, {}, {}])
    assert made._balance_batch(batch, metrics) is batch
    assert metrics == {"verl": 1, "megatrain/failed_answers": 1, "megatrain/lone_answers": 1}


def test_answers_of_prompts_that_verl_has_replaced_count_too(monkeypatch):
    made = with_data(monkeypatch)
    metrics = {"training/rollout_failure/evicted_samples": 3}
    made._balance_batch(SimpleNamespace(keys=["a_0_0", "a_1_0", "b_0_0", "b_1_0"], tags=[{}] * 4), metrics)
    assert metrics["megatrain/failed_answers"] == 6
    source = inspect.getsource(replay_buffer.ReplayBuffer._evict_terminal_groups)
    assert "{prefix}/rollout_failure/evicted_samples" in source


def test_failed_answers_are_in_the_metrics_of_a_validation(monkeypatch):
    metrics = with_data(monkeypatch)._val_metrics_update([], ["a"], {}, [], expected_acc_counts={("x", "a"): 2})
    assert metrics == {"val": 1, "megatrain/failed_val_answers": 1}


@pytest.mark.parametrize(
    "changes, told", [({"train": (1,)}, r"data\.train_files: 1"), ({"validation": ()}, r"data\.val_files: 0")]
)
def test_too_little_data_is_told_before_anything_is_built(monkeypatch, changes, told):
    with pytest.raises(ValueError, match=told):
        with_data(monkeypatch, **changes)._init_dataloader()
    with_data(monkeypatch)._init_dataloader()


def test_verl_counts_the_answers_of_a_validation_as_ours_expects():
    """By keyword, with one uid for each answer."""
    source = inspect.getsource(PPOTrainer._validate)
    assert "expected_acc_counts=expected_acc_counts" in source and "sample_uids.extend(data.pop(" in source
    assert "batch = upsample_batch_to_divisible_size(" in inspect.getsource(PPOTrainer._balance_batch)


# ---- errors in words of the run ----


def died(class_name: str) -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = f"The actor died unexpectedly before finishing this task.\n\tclass_name: {class_name}"
    return error


DEAD_TRAINER = died("create_colocated_worker_cls.<locals>.WorkerDict")
NO_VALIDATION = ValueError("Received an empty list as keys.")  # TransferQueue's, when VERL asks for none
NO_ANSWERS = RuntimeError("Sync replay buffer selected terminal groups with no materializable trajectories.")


@pytest.mark.parametrize(
    "error, told",
    [
        (DEAD_TRAINER, "trainer's process.*host RAM.*checkpoint"),
        (NO_ANSWERS, "every answer of this batch.*rollout engine.*reward function.*checkpoint"),
        (NO_VALIDATION, "every answer of this validation.*rollout engine.*reward function.*checkpoint"),
    ],
)
@pytest.mark.parametrize("where", ["init", "fit"])
def test_what_happened_is_told(monkeypatch, error, told, where):
    class PPOTrainer:
        def __init__(self, config):
            self.config = config

        def init(self):
            raise error

        def fit(self, agent_loops):
            raise error

    monkeypatch.setattr(trainer, "_watch_memory", lambda: None)
    made = type("Trainer", (RunOfOurs, PPOTrainer), {})(config())
    with pytest.raises(RuntimeError, match=told) as raised:
        made.init() if where == "init" else made.fit("agent loops")
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [died("AgentLoopWorker"), ValueError("WorkerDict"), RuntimeError("something else")])
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as raised, told_again():
        raise error
    assert raised.value is error


def test_verl_still_says_it_unclearly():
    """VERL's code still has no better text for these errors, and passes them on as they are."""
    queue = Path(importlib.util.find_spec("transfer_queue").submodule_search_locations[0])
    assert f'"{NO_VALIDATION}"' in (queue / "client.py").read_text()
    source = inspect.getsource(replay_buffer.ReplayBuffer.sample)
    assert "no materializable trajectories" in source and "engine" not in source.split("materializable")[1][:200]
    for call in (PPOTrainer.init, PPOTrainer.fit):
        assert "ActorDied" not in inspect.getsource(call)


# ---- what is watched ----


def warnings(caplog) -> list:
    """The records that our trainer has logged."""
    return [record for record in caplog.records if record.name == trainer.__name__]


def test_its_logger_is_watched_with_the_memory_of_the_start(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(trainer.monitoring, "attach", lambda *arguments, **more: seen.append((*arguments, more)))
    made = built("sync", f"trainer.default_local_dir={tmp_path}")
    made.logger = "VERL's"
    [(logger, given, more)] = seen
    assert logger == made.logger == "VERL's" and given["trainer"]["default_local_dir"] == str(tmp_path)
    assert more["watch"] is made._memory is not None and more["startup_s"] == made._times.phases_s()


def test_memory_that_cannot_be_watched_stops_nothing(monkeypatch, caplog):
    monkeypatch.setattr(trainer.monitoring, "watch_memory", lambda: 1 / 0)
    assert built()._memory is None and len(warnings(caplog)) == 1
