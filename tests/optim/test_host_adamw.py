"""The optimizer's thread alone: order of jobs, the end of an early update, what its readers see, its errors.

What must hold: a right guess is the deferred update to the bit; a wrong one, corrected or taken back, is so to fp32
rounding and to the bit the same however far the worker had come; readers wait for corrections and nobody waits for
ever. The worker is held up where a test needs to know what has been stepped.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable

import pytest
import tiny
import torch

from megatrain_rl.config import AdamWConfig
from megatrain_rl.host.gradients import HostGradients
from megatrain_rl.host.store import HostStore
from megatrain_rl.model.decoder import decoder_spec
from megatrain_rl.ops.adamw import Mode, join_master, split_master
from megatrain_rl.optim.host_adamw import HostAdamW
from megatrain_rl.optim.update import ClipGate, State, Update

U = 2.0**-24
LR = 1e-3
ORDER = ("head", "layers.2", "layers.1", "layers.0", "embed")  # of backward; the last one is held
GUESSED = ORDER[:-1]


class Rig:
    """A HostAdamW over random weights, after one deferred step, with a second gradient in place. scale: of that
    gradient. By the chance of two normal draws some elements are beyond the guard: several per cent with fp32 moments,
    more with bf16 ones."""

    def __init__(self, *, dtype=torch.bfloat16, state_dtype=torch.float32, scale=1.0):
        self.spec = decoder_spec(tiny.config(layers=3))
        self.store = HostStore(self.spec, dtype, pin=False)
        self.gradients = HostGradients(self.spec, torch.float32, pin=False)
        self.adamw = AdamWConfig(lr=LR, weight_decay=0.1)
        self.optimizer = HostAdamW(
            self.spec, self.store, self.gradients, self.adamw, None, state_dtype=state_dtype, threads=1
        )
        generator = torch.Generator().manual_seed(0)
        for block in self.spec.blocks:
            master = torch.randn(block.layout.numel, generator=generator) * 0.05
            if dtype == torch.bfloat16:
                split_master(master, self.store.read(block), self.optimizer.state[block.name].residual)
            else:
                self.store.read(block).copy_(master)
            self.gradients.flat(block).copy_(torch.randn(master.shape, generator=generator) * 1e-3)
        self.update = Update(self.spec, self.gradients, self.optimizer, self.adamw, overlap=True)
        self.optimizer.start_step(lr=LR, grad_scale=1.0)
        self.optimizer.wait()
        for block in self.spec.blocks:
            self.gradients.flat(block).copy_(torch.randn(block.layout.numel, generator=generator) * 1e-3 * scale)
        self.names = [b.name for b in self.spec.blocks]
        self.done: list[str] = []  # blocks whose job has begun
        self.passes: list[tuple[str, Mode]] = []
        self._may_go, self._do = threading.Event(), self.optimizer._do
        self._may_go.set()
        self.optimizer._do = self._watched
        self._do_pass = self.optimizer._do_pass
        self.optimizer._do_pass = self._watched_pass

    def _watched(self, block, job):
        self.done.append(block.name)
        assert self._may_go.wait(30)
        self._do(block, job)

    def _watched_pass(self, block, each):
        self.passes.append((block.name, each.mode))
        return self._do_pass(block, each)

    def modes(self, name: str) -> list[Mode]:
        return [mode for block, mode in self.passes if block == name]

    def guess(self, *, limit: float = math.inf, lr: float = LR) -> None:
        """Begin an early update after a norm well below `limit`."""
        self.update.gate = ClipGate(limit)
        self.update.gate.saw(0.0)
        self.update.promise()
        self.update.guess(lr=lr)
        assert self.update.state is State.GUESSED

    def confirm(self, *, grad_scale: float) -> None:
        self.update.confirm(lr=LR, grad_scale=grad_scale)

    def take_back(self) -> None:
        self.update.take_back()

    def hold(self) -> None:
        """The worker stops in front of its next job, which it has taken already."""
        self._may_go.clear()

    def release(self) -> None:
        self._may_go.set()

    def land(self, *names: str, norm: float | None = None) -> None:
        """norm: in place of the gradient's."""
        for block in self.spec.blocks:
            if block.name in names:
                self.update.landed(block, self.gradients.flat(block).norm().item() if norm is None else norm)

    def land_backwards(self) -> None:
        """As the trainer does."""
        for name in ORDER:
            self.land(name)

    def land_all(self) -> None:
        """Every gradient, also where `Update.end` looks for their norms."""
        for block in self.spec.blocks:
            self.gradients.landed(block, 1.0)
            self.update.landed(block, 1.0)

    def until_begun(self, n: int) -> None:
        end = time.monotonic() + 30
        while len(self.done) < n:
            assert time.monotonic() < end
            time.sleep(0.0005)

    def update_with(
        self, progress: int | None, end: Callable[[], None], *, norms: dict[str, float] | None = None
    ) -> None:
        """An update in which `end` comes when this many blocks have been stepped and the next one is under way; None:
        with all blocks queued still."""

        def land(*names: str) -> None:
            for name in names:
                self.land(name, norm=(norms or {}).get(name))

        if progress is None:
            with self.optimizer.together():  # the worker cannot take a job
                self.guess()
                land(*ORDER)
                end()
            return
        self.guess()
        for n in range(progress):
            land(ORDER[n])
            self.optimizer.settle()
        self.hold()
        land(ORDER[progress])
        if progress < len(ORDER) - 1:
            self.until_begun(progress + 1)
        land(*ORDER[progress + 1 :])
        end()
        self.release()

    def state(self) -> dict[str, torch.Tensor]:
        self.optimizer.settle()
        every = {}
        for block in self.spec.blocks:
            state = self.optimizer.state[block.name]
            every |= {f"{block.name}.{k}": t.clone() for k, t in state.tensors().items()}
            every[f"{block.name}.weight"] = self.store.read(block).clone()
        return every

    def close(self) -> None:
        self.release()
        self.optimizer.close()
        self.gradients.close()
        self.store.close()


@pytest.fixture
def make_rig():
    with contextlib.ExitStack() as stack:

        def make(**settings):
            rig = Rig(**settings)
            stack.callback(rig.close)
            return rig

        yield make


def master(state, name):
    weight = state[f"{name}.weight"]
    return weight if weight.dtype == torch.float32 else join_master(weight, state[f"{name}.residual"])


def different(a, b):
    return [name for name in a if not torch.equal(a[name], b[name])]


def blocks_of(names):
    return {name.rsplit(".", 1)[0] for name in names}


def assert_close(ours, theirs, before, rig, *, state_dtype=torch.float32, again=False):
    """What is left of a step taken back, and with `again` of the step after it: see tests/ops/test_adamw.py. In fp32 at
    most U (6 + 100) of v and U (6 |m| + 0.12 |g|); in bf16 two roundings of up to three times v, and of m with g in it.
    A weight with fp32 moments, or that was only taken back, is off by roundings of it and of steps, of which none is
    over 40 learning rates, and one with bf16 moments by their error too, as part of the step."""
    bf16 = state_dtype == torch.bfloat16
    unit, per_v, per_g = (2.0**-7, 6, 0.3) if bf16 else (U, 140, 0.2)
    for block in rig.spec.blocks:
        g = rig.gradients.flat(block).double().abs()
        for key, change in (("exp_avg", per_g * g), ("exp_avg_sq", 0)):
            a, b, start = (x[f"{block.name}.{key}"].double() for x in (ours, theirs, before))
            of = torch.maximum(b.abs(), start.abs()) * (16 if key == "exp_avg" and not bf16 else per_v)
            # beyond the guard everything is the same
            assert ((a - b).abs() <= unit * (of + change)).all(), (block.name, key)
        a, b, start = (master(x, block.name).double() for x in (ours, theirs, before))
        if again and bf16:
            assert (a - b).norm() <= 0.05 * (b - start).norm(), block.name
        else:
            assert ((a - b).abs() <= U * (16 * b.abs() + 400 * LR)).all(), block.name


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
STATE_DTYPES = pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32])
PROGRESS = (None, 0, 2, 4)


def test_blocks_are_stepped_in_the_order_of_next_use(make_rig):
    """Landed as backward finishes them while the worker is busy with the first: the next forward starts with the
    embedding."""
    rig = make_rig()
    rig.update_with(0, lambda: rig.confirm(grad_scale=1.0))
    rig.optimizer.wait()
    assert rig.done == ["head", "embed", "layers.0", "layers.1", "layers.2", "head"]


@DTYPES
@STATE_DTYPES
@pytest.mark.parametrize("progress", PROGRESS)
def test_a_right_guess_is_the_deferred_update_to_the_bit(make_rig, dtype, state_dtype, progress):
    """Whatever had been stepped when the factor, 1, became known; with what the guard had left out."""
    early, late = make_rig(dtype=dtype, state_dtype=state_dtype), make_rig(dtype=dtype, state_dtype=state_dtype)
    late.optimizer.start_step(lr=LR, grad_scale=1.0)
    early.update_with(progress, lambda: early.confirm(grad_scale=1.0))
    assert not different(early.state(), late.state())
    assert early.optimizer.step_count == late.optimizer.step_count == 2
    assert early.update.state is State.CONFIRMED
    assert all(early.modes(name) == [Mode.GUARDED, Mode.FINISH] for name in GUESSED)
    assert early.modes("embed") == [Mode.STEP] and set(early.optimizer._left) == set(range(1, 5))
    assert all(left > 0 for left in early.optimizer._left.values())


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("progress", PROGRESS)
def test_nothing_left_needs_no_second_pass(make_rig, state_dtype, progress):
    """A gradient like the last one is within the guard everywhere: blocks that were done stay open to readers."""
    early, late = make_rig(state_dtype=state_dtype), make_rig(state_dtype=state_dtype)
    generator = torch.Generator().manual_seed(3)
    for rig in (early, late):
        for block in rig.spec.blocks:
            v = rig.optimizer.state[block.name].exp_avg_sq.float().clamp(min=1e-30)
            rig.gradients.flat(block).copy_(
                v.sqrt() * (torch.rand(v.shape, generator=generator.manual_seed(3)) * 40 - 20)
            )
    late.optimizer.start_step(lr=LR, grad_scale=1.0)
    readable = {}

    def confirm():
        early.hold()
        early.confirm(grad_scale=1.0)
        readable.update({b.name: early.store.readable(b) for b in early.spec.blocks})
        early.release()

    early.update_with(progress, confirm)
    assert not different(early.state(), late.state())
    assert all(early.modes(name) == [Mode.GUARDED] for name in GUESSED) and early.modes("embed") == [Mode.STEP]
    assert [name for name in ORDER if readable[name]] == list(ORDER[: progress or 0])


@DTYPES
@STATE_DTYPES
def test_a_corrected_update_is_the_deferred_one_to_rounding(make_rig, dtype, state_dtype):
    """Clip factor 0.25 after a guess of 1. To the bit the same whenever the factor came; the held block and what was
    beyond the guard equal to the bit with the deferred update too."""
    late = make_rig(dtype=dtype, state_dtype=state_dtype)
    before = late.state()
    late.optimizer.start_step(lr=LR, grad_scale=0.25)
    theirs, results = late.state(), []
    for progress in PROGRESS:
        rig = make_rig(dtype=dtype, state_dtype=state_dtype)
        rig.update_with(progress, lambda rig=rig: rig.confirm(grad_scale=0.25))
        results.append(rig.state())
        assert all(rig.modes(name) == [Mode.GUARDED, Mode.UNDO, Mode.STEP] for name in GUESSED)
        assert rig.modes("embed") == [Mode.STEP] and rig.optimizer.step_count == 2
        assert not different(results[0], results[-1])
    assert blocks_of(different(results[0], theirs)) == set(GUESSED)  # a correction does show
    assert_close(results[0], theirs, before, late, state_dtype=state_dtype, again=True)
    guard = 1e5 if state_dtype == torch.float32 else 2e3
    for block in late.spec.blocks:
        left = late.gradients.flat(block).square() > 1.01 * guard * before[f"{block.name}.exp_avg_sq"].float()
        assert left.any()
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(*(s[f"{block.name}.{key}"][left] for s in (results[0], theirs)))
        assert torch.equal(*(master(s, block.name)[left] for s in (results[0], theirs)))


@DTYPES
@STATE_DTYPES
def test_an_update_taken_back_never_was(make_rig, dtype, state_dtype):
    """To rounding where a block had been stepped, to the bit where not, and the same whenever the news came; the next
    update is number two again."""
    results, norms = [], {"layers.0": math.nan}
    for progress in PROGRESS[:-1]:
        rig = make_rig(dtype=dtype, state_dtype=state_dtype)
        before = rig.state()
        rig.update_with(progress, rig.take_back, norms=norms)
        results.append(rig.state())
        assert all(rig.modes(name) == [Mode.GUARDED, Mode.UNDO] for name in ORDER[:3])
        assert not different(results[0], results[-1])
        assert rig.optimizer.step_count == 1 and rig.update.state is State.TAKEN_BACK
        assert all(rig.store.readable(b) for b in rig.spec.blocks)
    assert blocks_of(different(results[0], before)) == set(ORDER[:3])
    assert_close(results[0], before, before, rig, state_dtype=state_dtype)
    deferred = make_rig(dtype=dtype, state_dtype=state_dtype)
    for each in (rig, deferred):
        each.optimizer.start_step(lr=LR, grad_scale=1.0)
    ours, theirs = rig.state(), deferred.state()
    for name in rig.names:
        a, b, start = (master(s, name).double() for s in (ours, theirs, before))
        assert (a - b).norm() <= (0.05 if state_dtype == torch.bfloat16 else 1e-4) * (b - start).norm()


@STATE_DTYPES
@pytest.mark.parametrize("spike", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("end", ["corrected", "taken back"])
def test_moments_survive_a_spike(make_rig, state_dtype, spike, end):
    """Gradients far above the limit, as clipping is for: the moments that were there before must not drown in them.

    Corrected: close to the deferred update, beside its size. Taken back: close to what there was."""
    early, late = make_rig(state_dtype=state_dtype, scale=spike), make_rig(state_dtype=state_dtype, scale=spike)
    before = early.state()
    if end == "corrected":
        late.optimizer.start_step(lr=LR, grad_scale=1 / spike)
        early.update_with(4, lambda: early.confirm(grad_scale=1 / spike))
    else:
        early.update_with(4, early.take_back)
    ours, theirs = early.state(), late.state()
    assert Mode.UNDO in early.modes("head")
    tolerance = 0.02 if state_dtype == torch.bfloat16 else 1e-4
    for name in early.names:
        for key in ("exp_avg", "exp_avg_sq"):
            a, b = (s[f"{name}.{key}"].double() for s in (ours, theirs))
            assert (a - b).norm() <= tolerance * b.norm(), (name, key)
        a, b, start = (master(s, name).double() for s in (ours, theirs, before))
        bound = (
            tolerance * (b - start).norm() if end == "corrected" else U * (16 * b.norm() + 400 * LR * b.numel() ** 0.5)
        )
        assert (a - b).norm() <= bound, name


@pytest.mark.parametrize("norm", [4.01, math.inf, math.nan, 1e200])
@pytest.mark.parametrize("end", ["corrected", "taken back", "right"])
def test_blocks_are_held_once_the_norms_are_over_the_limit(make_rig, norm, end):
    """Limit 5: 3 and 4 are within it, 3 and 4.01 are not. What comes after, however small, waits for the factor and
    gets it."""
    rig, late = make_rig(), make_rig()
    before = rig.state()
    rig.guess(limit=5.0)
    rig.land("head", norm=3.0)
    rig.land("layers.2", norm=norm)
    rig.land("layers.1", norm=0.0)
    rig.land("layers.0", norm=1e-9)
    rig.land("embed", norm=0.0)
    rig.optimizer.settle()
    assert rig.passes == [("head", Mode.GUARDED)]
    held = set(ORDER[1:])
    if end == "taken back":
        rig.take_back()
        assert blocks_of(different(rig.state(), before)) == {"head"}
        assert rig.modes("head") == [Mode.GUARDED, Mode.UNDO] and rig.done == ["head", "head"]
        return
    scale = 0.25 if end == "corrected" else 1.0
    rig.confirm(grad_scale=scale)
    late.optimizer.start_step(lr=LR, grad_scale=scale)
    assert blocks_of(different(rig.state(), late.state())) == ({"head"} if end == "corrected" else set())
    assert all(rig.modes(name) == [Mode.STEP] for name in held)


def test_a_norm_at_the_limit_is_within_it(make_rig):
    """And the last block waits all the same."""
    rig = make_rig()
    rig.guess(limit=5.0)
    for name, norm in zip(ORDER, (3.0, 4.0, 0.0, 0.0, 0.0), strict=True):
        rig.land(name, norm=norm)
    rig.optimizer.settle()
    assert sorted(rig.passes) == sorted((name, Mode.GUARDED) for name in GUESSED)
    rig.confirm(grad_scale=1.0)
    rig.optimizer.wait()
    assert rig.modes("embed") == [Mode.STEP]


def test_the_last_block_is_held_whichever_it_is(make_rig):
    rig, late = make_rig(), make_rig()
    late.optimizer.start_step(lr=LR, grad_scale=1.0)
    rig.guess()
    for name in reversed(ORDER):
        rig.land(name)
    rig.optimizer.settle()
    assert not rig.modes("head")
    rig.confirm(grad_scale=1.0)
    assert not different(rig.state(), late.state()) and rig.modes("head") == [Mode.STEP]


def test_updates_follow_one_another(make_rig):
    """Right, wrong, taken back, right: each begins where the last one ended, and knows nothing of what the last one
    left."""
    rig, late = make_rig(dtype=torch.float32), make_rig(dtype=torch.float32)
    for progress, scale in ((4, 1.0), (None, 0.5), (2, None), (0, 1.0), (4, 1.0)):
        if scale is None:
            rig.update_with(progress, rig.take_back)
        else:
            rig.update_with(progress, lambda scale=scale: rig.confirm(grad_scale=scale))
            late.optimizer.start_step(lr=LR, grad_scale=scale)
        ours, theirs = rig.state(), late.state()
        for name in rig.names:
            assert (ours[f"{name}.weight"] - theirs[f"{name}.weight"]).norm() <= 1e-5 * theirs[f"{name}.weight"].norm()
        assert rig.optimizer.step_count == late.optimizer.step_count
    assert rig.optimizer.step_count == 5


def test_landings_outside_an_early_update_are_ignored(make_rig):
    """Gradients of earlier sweeps land too."""
    rig = make_rig()
    before = rig.state()
    rig.land_backwards()
    rig.optimizer.settle()
    assert rig.done == [] and not different(rig.state(), before)
    rig.take_back()  # nothing to take back
    assert rig.optimizer.step_count == 1


def test_an_early_update_keeps_the_rate_of_its_guess(make_rig):
    """Whatever its end is told; one that did not begin early has the rate of its end."""
    rig = make_rig()
    rig.land_all()
    assert rig.update.end(lr=0.5).lr == 0.5
    rig.guess(lr=0.0)
    rig.land_all()
    assert rig.update.end(lr=0.5).lr == 0.0
    rig.guess(lr=0.0)
    rig.take_back()
    rig.land_all()
    assert rig.update.end(lr=0.5).lr == 0.5


@pytest.mark.parametrize("end", ["finished", "corrected", "taken back"])
def test_nobody_reads_a_block_before_its_correction(make_rig, end):
    rig = make_rig()
    rig.guess()
    rig.land_backwards()
    rig.optimizer.settle()
    assert all(rig.store.readable(b) for b in rig.spec.blocks)
    wrong = rig.state()
    rig.hold()
    if end == "taken back":
        rig.take_back()
    else:
        rig.confirm(grad_scale=1.0 if end == "finished" else 0.25)
    open_now = [b.name for b in rig.spec.blocks if rig.store.readable(b)]
    assert open_now == (["embed"] if end == "taken back" else [])  # which was never stepped
    seen = {}

    def read():
        for block in reversed(rig.spec.blocks):
            seen[block.name] = rig.store.read(block).clone()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(0.1)
    assert reader.is_alive() and not seen
    rig.release()
    reader.join(30)
    right = rig.state()
    for name in rig.names:
        assert torch.equal(seen[name], right[f"{name}.weight"])
    assert any(not torch.equal(seen[n], wrong[f"{n}.weight"]) for n in rig.names)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_block_under_way_is_corrected_before_it_is_readable(make_rig, scale):
    """The factor comes while the worker is inside a block: its end must not open the block."""
    rig = make_rig()
    opened, end_write = [], rig.store.end_write

    def watched(block):
        opened.append((block.name, len(rig.done)))
        end_write(block)

    rig.store.end_write = watched
    rig.update_with(0, lambda: rig.confirm(grad_scale=scale))
    rig.optimizer.wait()
    assert [name for name, _ in opened].count("head") == 1
    assert dict(opened)["head"] == 6  # its second job, the last of all


@pytest.mark.parametrize("end", ["right", "corrected", "taken back"])
@pytest.mark.parametrize("failing", ["layers.1", "embed"])
@pytest.mark.parametrize("progress", PROGRESS)
def test_an_error_in_an_early_step_reaches_every_reader(make_rig, end, failing, progress):
    """As it was raised, whatever of the block was still to come."""
    rig = make_rig()
    go_on = rig.optimizer._do_pass

    def fail(block, each):
        if block.name == failing and each.mode in (Mode.GUARDED, Mode.STEP):
            raise MemoryError("no room")
        return go_on(block, each)

    rig.optimizer._do_pass = fail
    ends = {"right": lambda: rig.confirm(grad_scale=1.0), "corrected": lambda: rig.confirm(grad_scale=0.5)}
    rig.update_with(progress, ends.get(end, rig.take_back))
    rig.optimizer.settle()
    if failing == "embed" and end == "taken back":  # held, so nothing failed
        rig.optimizer.wait()
        return
    for block in rig.spec.blocks:
        with pytest.raises(RuntimeError, match="host optimizer") as error:
            rig.store.read(block)
        assert isinstance(error.value.__cause__, MemoryError)
    with pytest.raises(RuntimeError):
        rig.guess()
    assert rig.update.state is State.PROMISED  # and not guessed


@pytest.mark.parametrize("end", ["right", "corrected", "taken back"])
def test_an_error_of_a_block_under_way_is_the_one_that_is_told(make_rig, end):
    """Its next job was queued before it failed, and cannot know."""
    rig = make_rig()
    go_on, failed = rig.optimizer._do_pass, []

    def fail_once(block, each):
        if block.name == "head" and not failed:
            failed.append(each.mode)
            raise MemoryError("no room")
        return go_on(block, each)

    rig.optimizer._do_pass = fail_once
    ends = {"right": lambda: rig.confirm(grad_scale=1.0), "corrected": lambda: rig.confirm(grad_scale=0.5)}
    rig.update_with(0, ends.get(end, rig.take_back))
    rig.optimizer.settle()
    assert failed == [Mode.GUARDED]
    for block in rig.spec.blocks:
        with pytest.raises(RuntimeError, match="host optimizer") as error:
            rig.store.read(block)
        assert isinstance(error.value.__cause__, MemoryError)


@pytest.mark.parametrize("end", ["open", "right", "corrected", "taken back", "held"])
def test_close_with_jobs_pending(end):
    """Returns once the worker is through, and leaves no thread."""
    rig = Rig()
    rig.hold()
    rig.guess()
    rig.land("head")
    rig.until_begun(1)
    for name in ORDER[1:]:
        rig.land(name, norm=math.nan if end == "held" else None)
    if end == "taken back":
        rig.take_back()
    elif end in ("right", "corrected"):
        rig.confirm(grad_scale=1.0 if end == "right" else 0.5)
    closer = threading.Thread(target=rig.optimizer.close, daemon=True)
    closer.start()
    assert closer.is_alive(), "it waits for the worker, which is held"
    rig.release()
    closer.join(30)
    assert not closer.is_alive() and not rig.optimizer._worker.is_alive()
    assert not rig.optimizer._jobs and not rig.optimizer._waiting
    rig.gradients.close()
    rig.store.close()
