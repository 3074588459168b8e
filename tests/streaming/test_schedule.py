"""The order of visits, checked by replaying it against a model of the slots."""

import pytest

from megatrain_rl.streaming.schedule import Kind, LayerSchedule


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8, 28])
@pytest.mark.parametrize("interval", [1, 2, 3, 4, 50])
def test_every_visit_finds_its_input(layers, interval):
    """Replay: a slot holds boundary b only if the visit that read boundary b-1 wrote it there, and nothing reads it
    after its last read. Boundary 0 is in slot 0 at the start; backward visits find their layer's own input."""
    schedule = LayerSchedule(layers, interval, train=True)
    slots = {0: 0}
    forward, backward = [], []
    for visit in schedule.visits:
        assert slots[visit.input_slot] == visit.layer
        if visit.last_read:
            del slots[visit.input_slot]
        if visit.kind is Kind.BACKWARD:
            backward.append(visit.layer)
        else:
            assert visit.output_slot < schedule.num_slots
            slots[visit.output_slot] = visit.layer + 1
            if visit.kind is Kind.FORWARD:
                forward.append(visit.layer)
    assert forward == list(range(layers)) and backward == forward[::-1]
    assert schedule.num_forward == layers
    recomputed = sum(v.kind is Kind.RECOMPUTE for v in schedule.visits)
    assert recomputed == layers - len(range(0, layers, interval))


def test_interval_one_streams_each_layer_twice_and_keeps_every_input():
    schedule = LayerSchedule(28, 1, train=True)
    assert len(schedule.visits) == 56
    assert schedule.num_slots == 29


def test_larger_interval_needs_fewer_slots():
    assert [LayerSchedule(28, k, train=True).num_slots for k in (1, 2, 4)] == [29, 16, 11]


def test_forward_only_needs_two_slots():
    schedule = LayerSchedule(28, 3, train=False)
    assert schedule.num_slots == 2 and len(schedule.visits) == 28
    assert all(v.last_read for v in schedule.visits)
