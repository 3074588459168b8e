"""The native host AdamW in its four modes.

Native against the torch reference, to the bit; the exactness of the 2 + 2 byte master; a guarded step that is finished
is the step; how far one that is taken back is from never made, whatever the gradient; stochastic rounding of bf16
moments: without bias, the same for the same key; the compiler makes vector code of every mode.
"""

import re
from collections import Counter

import pytest
import torch

from megatrain_rl.ops import build
from megatrain_rl.ops.adamw import (
    LEFT_GRAIN,
    AdamWScalars,
    Mode,
    adamw_native,
    adamw_reference,
    join_master,
    split_master,
)

U = 2.0**-24  # half a unit in the last place of 1, relative: what one fp32 operation may be off by
BF16_ULP = 2.0**-7  # most that a stochastic rounding may be off by, relative
DTYPES = [torch.bfloat16, torch.float32]
SETTINGS = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=7, grad_scale=1.0)
BETAS2 = (0.0, 0.5, 0.95, 0.99, 0.999, 0.9999)


def arrays(n, *, split, grad_dtype, moments=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(n, generator=generator)  # noqa: E731
    master = draw()
    weight, residual = (
        (torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)) if split else (master, None)
    )
    if split:
        split_master(master, weight, residual)
    return [weight, residual, (draw() * 3).to(grad_dtype), (draw() * 0.1).to(moments), draw().square().to(moments)]


def spiky(n, *, split, grad_dtype, moments, grad_size=1e-3, seed=0):
    """Gradients from a hundredth to 1e8 times what v has seen, 10 % of them 0.

    v is spread over six decades; 10 % of its elements have seen nothing, and there m is zero.
    """
    generator = torch.Generator().manual_seed(seed)
    weight, residual, *_ = arrays(n, split=split, grad_dtype=grad_dtype, seed=seed)
    draw, uniform = torch.randn(3, n, generator=generator), torch.rand(4, n, generator=generator)
    root = grad_size * 10 ** (3 * uniform[0] - 1.5) * (uniform[1] > 0.1)
    grad = draw[0] * grad_size * 10 ** (10 * uniform[2] - 2) * (uniform[3] > 0.1)
    return [weight, residual, grad.to(grad_dtype), (draw[1] * root).to(moments), root.square().to(moments)]


def clone(tensors):
    return [None if t is None else t.clone() for t in tensors]


def assert_same_bits(ours, theirs, where=slice(None)):
    for a, b in zip(ours, theirs, strict=True):
        if a is None:
            assert b is None
            continue
        bits = torch.int32 if a.element_size() == 4 else torch.int16
        assert a.dtype == b.dtype and torch.equal(a.view(bits)[where], b.view(bits)[where])


def beyond_guard(state, scalars):
    """The predicate, in fp32 as the op has it."""
    g = state[2].float() * torch.tensor(scalars.grad_scale)
    return g * g > state[4].float() * torch.tensor(scalars.guard)


def whole(state):
    return (state[0] if state[1] is None else join_master(state[0], state[1])).double()


PASSES = (
    (1, Mode.STEP),
    (2, Mode.GUARDED),
    (2, Mode.FINISH),
    (3, Mode.GUARDED),
    (3, Mode.UNDO),
    (3, Mode.STEP),
    (4, Mode.UNDO),
)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 1000, 65535, 65536, 65537, 2 * 65536 + 33])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("moments", DTYPES)
def test_native_equals_reference_to_the_bit(n, split, grad_dtype, moments):
    """All modes one after the other, elements on both sides of the guard, the count too, any number of threads."""
    reference = arrays(n, split=split, grad_dtype=grad_dtype, moments=moments)
    reference[2][::7] *= 1e4
    natives, counts = {threads: clone(reference) for threads in (1, 2, 3, 5)}, []
    for step, mode in PASSES:
        scalars = AdamWScalars.of(
            lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=step, grad_scale=0.37, moments=moments
        )
        key = (step * 0x9E3779B1 + 12345 * (mode is Mode.UNDO)) & 0xFFFFFFFF
        before = clone(reference)
        counts.append(adamw_reference(*reference, scalars, key=key, mode=mode))
        for threads, native in natives.items():
            assert adamw_native(*native, scalars, threads, key=key, mode=mode) == counts[-1]
            assert_same_bits(native, reference)
        assert n < 100 or not torch.equal(before[4], reference[4]) or counts[-1] == 0  # each did something
    assert n < 100 or n / 10 < counts[0] < n / 2


@pytest.mark.parametrize("grad_size", [1e-8, 1e-3, 1e4])
@pytest.mark.parametrize("beta2", BETAS2)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("moments", DTYPES)
def test_guarded_then_finish_is_the_step_to_the_bit(moments, grad_dtype, beta2, grad_size):
    """In between, the guard holds for exactly the elements that were left as they were."""
    for split in (True, False):
        start = spiky(40_011, split=split, grad_dtype=grad_dtype, moments=moments, grad_size=grad_size)
        check_guard(start, AdamWScalars.of(**SETTINGS | dict(betas=(0.9, beta2)), moments=moments))


def check_guard(start, scalars):
    stepped, now = clone(start), clone(start)
    left = beyond_guard(start, scalars)
    grains = -(-left.numel() // LEFT_GRAIN)
    marks = torch.full((grains,), 7, dtype=torch.uint8)
    assert 0.02 * left.numel() < left.sum() < 0.9 * left.numel()
    assert adamw_native(*stepped, scalars, 2, key=9) == left.sum()
    assert adamw_native(*now, scalars, 2, key=9, mode=Mode.GUARDED, left=marks) == left.sum()
    assert_same_bits(now, start, left)
    assert_same_bits(now, stepped, ~left)
    assert torch.equal(beyond_guard(now, scalars), left)
    assert torch.equal(marks, torch.stack([part.any() for part in left.split(LEFT_GRAIN)]).to(torch.uint8))
    by_marks = clone(now)
    assert adamw_native(*now, scalars, 2, key=9, mode=Mode.FINISH) == left.sum()
    assert_same_bits(now, stepped)
    assert adamw_native(*by_marks, scalars, 2, key=9, mode=Mode.FINISH, left=marks) == left.sum()
    assert_same_bits(by_marks, stepped)


def test_finish_reads_marked_grains_alone():
    start = arrays(3 * 65536 + 77, split=True, grad_dtype=torch.bfloat16)
    start[4].fill_(1.0)
    for i in (0, 4095, 9 * LEFT_GRAIN + 5, 2 * 65536, start[2].numel() - 1):
        start[4][i], start[2][i] = 1e-12, 1.0
    scalars = AdamWScalars.of(**SETTINGS)
    marks = torch.empty(-(-start[2].numel() // LEFT_GRAIN), dtype=torch.uint8)
    stepped, now = clone(start), clone(start)
    adamw_native(*stepped, scalars, 2)
    assert adamw_native(*now, scalars, 3, mode=Mode.GUARDED, left=marks) == 5
    assert marks.nonzero().flatten().tolist() == [0, 9, 32, 48]
    some = clone(now)
    marks[9] = 0
    assert adamw_native(*some, scalars, 3, mode=Mode.FINISH, left=marks) == 4
    grain = slice(9 * LEFT_GRAIN, 10 * LEFT_GRAIN)
    assert_same_bits(some, now, grain)
    marks[9] = 1
    assert adamw_native(*now, scalars, 3, mode=Mode.FINISH, left=marks) == 5
    assert_same_bits(now, stepped)


@pytest.mark.parametrize("moments", DTYPES)
@pytest.mark.parametrize("beta2", [0.5, 0.95, 0.999])
def test_guard_where_squares_are_no_normal_numbers(moments, beta2):
    """|g| is 1e-23 to 1e-18, as the logits of tokens that never come have.

    Rounding may then take all of v, and the guard must still know what has been stepped.
    """
    generator = torch.Generator().manual_seed(0)
    root = 10 ** (torch.rand(40_011, generator=generator) * 5 - 23)
    draw = torch.randn(3, 40_011, generator=generator)
    start = [draw[0], None, draw[1] * root, (draw[2] * root).to(moments), root.square().to(moments)]
    scalars = AdamWScalars.of(**SETTINGS | dict(betas=(0.9, beta2)), moments=moments)
    stepped, now = clone(start), clone(start)
    adamw_native(*stepped, scalars, 1, key=9)
    left = adamw_native(*now, scalars, 1, key=9, mode=Mode.GUARDED)
    assert adamw_native(*now, scalars, 1, key=9, mode=Mode.FINISH) == left
    assert_same_bits(now, stepped)


# Hyperparameters, and the size of gradients.
UNDO_CASES = {
    "in the middle of a run": {},
    "first step": dict(step=1),
    "huge gradients": dict(grad_size=1e8),
    "small gradients": dict(grad_size=1e-8),
    "beta1 zero": dict(betas=(0.0, 0.999)),
    "beta2 zero": dict(betas=(0.9, 0.0)),
    "beta2 small": dict(betas=(0.9, 0.5)),
    "beta2 near one": dict(betas=(0.95, 0.9999)),
    "strong decay": dict(lr=0.1, weight_decay=5.0),
    "clipped": dict(grad_scale=1e-3),
}


@pytest.mark.parametrize("case", UNDO_CASES)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("moments", DTYPES)
def test_undo_takes_a_guarded_step_back(case, split, grad_dtype, moments):
    """Elements beyond the guard come back to the bit; of the others each array does up to a bound.

    The bounds count the roundings there and back (b the beta, x = (1-b2) g^2):

    v   fp32: U (6 v + x / b2), and x <= 100 v under the guard: at most U (6 + 100 / b2) v, whatever g is
        bf16: 2^-7 ((b2 v + x) / b2 + v'), and x <= 2 v: at most 2^-7 (2 + 2 / b2) v and the second order
    m   fp32: U (6 |m| + (1-b1)/b1 |g|);  bf16: 2^-7 (|m| + (1-b1)/b1 |g| + |m'|);  with |g| <= sqrt(guard v)
    w   U (7 |w| + |step|) / decay with either moments: the step is computed twice from the same stored ones and cancels
    """
    more = dict(UNDO_CASES[case])
    before = spiky(40_011, split=split, grad_dtype=grad_dtype, moments=moments, grad_size=more.pop("grad_size", 1e-3))
    settings = SETTINGS | more
    b1, b2 = settings["betas"]
    scalars = AdamWScalars.of(**settings, moments=moments)
    left, now = beyond_guard(before, scalars), clone(before)
    adamw_native(*now, scalars, 1, key=3, mode=Mode.GUARDED)
    stepped = clone(now)
    assert adamw_native(*now, scalars, 1, key=4, mode=Mode.UNDO) == left.sum() > 0
    assert_same_bits(now, before, left)

    g, m, v = (before[i][~left].double() for i in (2, 3, 4))
    m_now, v_now = now[3][~left].double(), now[4][~left].double()
    g, tiny = g.abs() * settings["grad_scale"], 2.0**-146  # a few of the smallest numbers there are
    if b2 == 0:  # the step wiped it out: it cannot come back and the next step does not read it
        assert (v_now == 0).all()
    else:
        x, error = (1 - b2) * g.square(), (v_now - v).abs()
        fine, any_g = U * (6 * v + x / b2), U * (6 + 100 / b2) * v
        if moments == torch.bfloat16:
            fine, any_g = BF16_ULP * (v + x / b2 + v_now), BF16_ULP * (2 + 2 / b2) * 1.05 * v
        assert (error <= 1.01 * fine + tiny).all() and (error <= 1.01 * any_g + tiny).all()
        assert not ((v_now == 0) & (m_now != 0)).any()  # a step from there would be m / eps
    if b1 == 0:
        assert (m_now == 0).all()
    else:
        assert (g <= 1.01 * (scalars.guard * v).sqrt()).all()
        bound = U * (6 * m.abs() + (1 - b1) / b1 * g)
        if moments == torch.bfloat16:
            bound = BF16_ULP * (m.abs() + (1 - b1) / b1 * g + m_now.abs()) + 8 * U * m.abs()
        assert ((m_now - m).abs() <= 1.01 * bound + tiny).all()
    step = (whole(stepped) - whole(before) * scalars.decay).abs()
    bound = U * (7 * whole(before).abs() + 1.01 * step) / scalars.decay
    assert ((whole(now) - whole(before)).abs() <= bound)[~left].all()


def test_a_wiped_out_moment_is_not_missed():
    """With a beta of 0, the step after undo is the step that would have been made without the undone one."""
    for betas in ((0.0, 0.999), (0.9, 0.0)):
        now = arrays(1000, split=False, grad_dtype=torch.float32)
        scalars = AdamWScalars.of(lr=1e-3, betas=betas, eps=1e-8, weight_decay=0.0, step=7, grad_scale=1.0)
        expected = clone(now)
        adamw_native(*now, scalars, 1, mode=Mode.GUARDED)
        adamw_native(*now, scalars, 1, mode=Mode.UNDO)
        for state in (now, expected):
            adamw_native(*state, scalars, 1)
        assert all(torch.allclose(a, b, rtol=3e-5, atol=1e-6) for a, b in zip(now[3:], expected[3:], strict=True))
        assert torch.allclose(now[0], expected[0], rtol=0, atol=1e-6)


def rounded(m1, v1_root, key, *, step_once=adamw_native):
    """m and v in bf16 after a step that stores m1 and v1_root^2 as they are."""
    n = m1.numel()
    m, v = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.bfloat16)
    for values, betas in ((m1, (0.0, 1.0, 1.0, 0.0)), (v1_root, (1.0, 0.0, 0.0, 1.0))):
        b1, b2, o1, o2 = betas
        scalars = AdamWScalars(b1, b2, o1, o2, 1.0, 0.0, 1.0, 1e-8, 1.0, 1.0, 1.0, 1.0, 1.0)
        place = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.bfloat16)
        more = (1,) if step_once is adamw_native else ()
        step_once(torch.zeros(n), None, values, *place, scalars, *more, key=key)
        (m if b1 == 0 else v).copy_(place[0] if b1 == 0 else place[1])
    return m, v


KEYS = [(step * 0x9E3779B1 + 3 * 0x85EBCA77) & 0xFFFFFFFF for step in range(1, 2049)]  # as HostAdamW makes them


@pytest.mark.parametrize("part", [0.01, 1 / 3, 0.5, 0.9])
def test_stochastic_rounding_has_no_bias(part):
    """A value this far between two bf16 neighbours becomes the upper one this often.

    Over keys for each element (64 of them, 2048 keys: five sigmas are 0.056 at most), and over all (0.007).
    """
    ups = [torch.zeros(64), torch.zeros(64)]
    low = torch.linspace(0.5, 100, 64).bfloat16() * torch.tensor([1.0, -1.0]).repeat(32).bfloat16()
    high = (low.view(torch.int16) + 1).view(torch.bfloat16)  # away from zero
    m1 = low.float() + part * (high.float() - low.float())
    root = m1.abs().sqrt()
    v1 = root * root  # as the op squares it; its own neighbours and part
    v_low = ((v1.view(torch.int32) >> 16) << 16).view(torch.float32)
    v_high = ((v_low.view(torch.int32)) + 0x10000).view(torch.float32)
    for key in KEYS:
        m, v = rounded(m1, root, key)
        assert ((m == low) | (m == high)).all() and ((v.float() == v_low) | (v.float() == v_high)).all()
        ups[0] += (m == high).float()
        ups[1] += (v.float() == v_high).float()
    for up, expected in (
        (ups[0], (m1 - low.float()) / (high.float() - low.float())),
        (ups[1], (v1 - v_low) / (v_high - v_low)),
    ):
        deviation = up / len(KEYS) - expected
        assert deviation.abs().max() < 5 * (0.25 / len(KEYS)) ** 0.5
        assert deviation.mean().abs() < 5 * (0.25 / len(KEYS) / 64) ** 0.5


@pytest.mark.parametrize("step_once", [adamw_native, adamw_reference])
def test_exactly_representable_moments_stay(step_once):
    values = torch.cat([torch.randn(5000), torch.tensor([0.0, 1.0, 2.0**-120, 2.0**100])]).bfloat16().float()
    powers = 2.0 ** torch.arange(-60, 60)  # squares of these are bf16 too
    for key in (0, 1, 0xFFFFFFFF, *KEYS[:20]):
        assert torch.equal(rounded(values, values, key, step_once=step_once)[0].float(), values)
        assert torch.equal(rounded(powers, powers, key, step_once=step_once)[1].float(), powers.square())


def test_random_bits_are_those_of_the_key():
    values = torch.rand(10_000) + 0.5
    first, again, other = rounded(values, values, 7), rounded(values, values, 7), rounded(values, values, 8)
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b)
        assert 0.2 < (a != c).float().mean() < 0.8
    up_m, up_v = (first[0].float() > values), (first[1].float() > values * values)
    assert (torch.corrcoef(torch.stack([up_m, up_v]).float())[0, 1]).abs() < 0.05  # m and v are rounded independently


def test_an_update_below_half_an_ulp_moves_the_moment_in_the_mean():
    """64 additions of 1/16 ulp move by 4 ulp in the mean, where rounding to nearest stays for ever.

    5 sigmas over 4096 elements are 0.16.
    """
    n, ulp = 4096, 2.0**-7  # above 1
    m, v = torch.ones(n, dtype=torch.bfloat16), torch.ones(n, dtype=torch.bfloat16)
    grad = torch.full((n,), ulp / 16)
    assert ((m.float() + grad).bfloat16() == 1).all()
    scalars = AdamWScalars(
        1.0, 1.0, 1.0, 16 / ulp, 1.0, 0.0, 1.0, 1e-8, 1.0, 1.0, 1.0, 1.0, 1.0
    )  # v grows by ulp / 16 too
    for key in KEYS[:64]:
        adamw_native(torch.zeros(n), None, grad, m, v, scalars, 1, key=key)
    for moment in (m, v):
        moved = (moment.double().mean() - 1).item() / ulp
        assert abs(moved - 4) < 0.16


@pytest.mark.parametrize("step_once", [adamw_native, adamw_reference])
def test_equals_torch_adamw(step_once):
    weight, residual, grad, m, v = arrays(5000, split=True, grad_dtype=torch.float32)
    m.zero_(), v.zero_()
    parameter = torch.nn.Parameter(join_master(weight, residual).clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
    for step in range(1, 6):
        scalars = AdamWScalars.of(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2, step=step, grad_scale=0.5)
        step_once(weight, residual, grad, m, v, scalars, *((2,) if step_once is adamw_native else ()))
        parameter.grad = grad * 0.5
        optimizer.step()
    assert torch.allclose(join_master(weight, residual), parameter, rtol=2e-6, atol=1e-7)


def test_master_is_exact_for_every_kind_of_float():
    """All exponents, both signs, ties in both directions, zeros, infinities."""
    bits = torch.arange(-(2**31), 2**31, 4099, dtype=torch.int64).to(torch.int32)
    ties = (torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16) + 0x8000
    master = torch.cat([bits, ties]).view(torch.float32)
    weight, residual = torch.empty(master.shape, dtype=torch.bfloat16), torch.empty(master.shape, dtype=torch.int16)
    split_master(master, weight, residual)
    assert torch.equal(join_master(weight, residual).view(torch.int32), master.view(torch.int32))


def test_weight_is_the_nearest_bf16():
    master = torch.randn(100_000)
    weight, residual = torch.empty(master.shape, dtype=torch.bfloat16), torch.empty(master.shape, dtype=torch.int16)
    split_master(master, weight, residual)
    assert ((weight.float() - master).abs() <= (master.bfloat16().float() - master).abs()).all()


def test_tiny_learning_rate_moves_the_master_not_the_weight():
    weight, residual, grad, m, v = arrays(10_000, split=True, grad_dtype=torch.bfloat16)
    before, high = join_master(weight, residual).clone(), weight.clone()
    m.zero_(), v.zero_()
    scalars = AdamWScalars.of(lr=1e-6, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, step=1, grad_scale=1.0)
    adamw_native(weight, residual, grad, m, v, scalars, 1)
    moved = join_master(weight, residual) - before
    assert (moved.abs() > 0).float().mean() > 0.95
    assert (weight != high).float().mean() < 0.01


def test_every_mode_is_vector_code(tmp_path):
    """gcc reports the inner loop as one of vectors in every variant: modes x weights x gradients x moments.

    Scalar code takes 6 to 10 times as long as torch's fused AdamW on one thread, vector code 0.7 to 2.2 (AVX2). With
    the loop written as a reduction, gcc 12 vectorises 8 of the 32 variants.
    """
    source, compiler = build.source_of("adamw"), build.compiler()
    if "Free Software Foundation" not in compiler.version:
        pytest.skip(f"{compiler.command} is not gcc, which reports what it vectorises")
    [line] = [i for i, text in enumerate(source.read_text().splitlines(), 1) if "guarded[k] = one<mode>" in text]
    report = tmp_path / "report"
    compiler.build(source, tmp_path / "op.so", f"-fopt-info-vec-optimized={report}")
    found = re.findall(rf":{line}:\d+: optimized: loop vectorized using (\d+) byte vectors", report.read_text())
    [(size, variants)] = Counter(found).most_common(1)
    assert variants == len(Mode) * 2 * len(DTYPES) * len(DTYPES), Counter(found)
    assert int(size) >= 16


def test_missing_compiler_is_one_clear_error(monkeypatch):
    build.load_library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"no-such-compiler.*\bCXX\b.*optimizer=torch"):
        build.load_library("adamw")
    build.load_library.cache_clear()


def test_failed_build_says_what_the_compiler_said(monkeypatch, tmp_path):
    build.load_library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_FLAGS", ("--no-such-flag",))
    with pytest.raises(RuntimeError, match="no-such-flag"):
        build.load_library("adamw")
    assert not list(tmp_path.rglob("*.so"))
    build.load_library.cache_clear()
