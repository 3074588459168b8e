import math

import pytest

from megatrain_rl.optim.lr_schedule import LRSchedule


def series(n, **settings):
    """Factors of the first n steps, times 2."""
    schedule = LRSchedule(**settings)
    values = []
    for _ in range(n):
        values.append(2.0 * schedule.factor)
        schedule.step()
    return values


def test_constant_after_warmup():
    assert series(5, warmup_steps=2) == [0.0, 1.0, 2.0, 2.0, 2.0]


def test_no_warmup_starts_at_the_base():
    assert series(3) == [2.0, 2.0, 2.0]


def test_linear_and_cosine_end_at_the_minimum():
    assert series(6, kind="linear", total_steps=4, min_lr_ratio=0.5) == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0, 1.0])
    expected = [0.5 * 2 * (1 + math.cos(math.pi * t / 4)) for t in range(5)] + [0.0]
    assert series(6, kind="cosine", total_steps=4) == pytest.approx(expected)


def test_state_is_the_number_of_steps():
    schedule = LRSchedule(kind="linear", total_steps=10)
    for _ in range(3):
        schedule.step()
    other = LRSchedule(kind="linear", total_steps=10)
    other.load_state_dict(schedule.state_dict())
    assert other.factor == schedule.factor == pytest.approx(0.7)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(kind="wavy"), "lr_scheduler_type='wavy'"),
        (dict(kind="cosine"), "needs total_training_steps"),
        (dict(min_lr_ratio=2.0), "min_lr_ratio=2.0"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        LRSchedule(**settings)
