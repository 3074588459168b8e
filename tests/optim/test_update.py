"""When an update may start before its norm is known: only where a wrong guess is unlikely, and by norms alone."""

import json

import pytest

from megatrain_rl.optim.update import ClipGate


@pytest.mark.parametrize("limit", [None, 0, 0.0])
def test_always_quiet_without_a_limit(limit):
    gate = ClipGate(limit)
    assert gate.quiet and gate.limit == float("inf")
    gate.saw(1e30)
    assert gate.quiet


def test_not_quiet_without_history():
    gate = ClipGate(1.0)
    assert not gate.quiet
    gate.saw(0.5)
    assert gate.quiet


@pytest.mark.parametrize("norm, is_quiet", [(0.0, True), (1.79, True), (1.81, False), (2.0, False), (50.0, False)])
def test_a_norm_near_the_limit_is_not_quiet(norm, is_quiet):
    gate = ClipGate(2.0)
    assert gate.limit == 2.0
    gate.saw(0.1)
    gate.saw(norm)
    assert gate.quiet is is_quiet


def test_it_takes_four_quiet_norms_after_a_loud_one():
    gate = ClipGate(1.0)
    gate.saw(3.0)
    for _ in range(3):
        gate.saw(0.2)
        assert not gate.quiet
    gate.saw(0.2)
    assert gate.quiet


def test_memory_survives_a_checkpoint():
    """Through JSON, at every length: a gate that resumes decides like the one that went on."""
    norms = [0.1, 0.95, 0.3, 0.2, 0.1 + 0.2, 0.4, 7.0, 0.1, 0.1, 0.1, 0.1]
    whole = ClipGate(1.0)
    for i in range(len(norms)):
        resumed = ClipGate(1.0)
        resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        assert resumed.state_dict() == whole.state_dict()
        opens = []
        for gate in (ClipGate(1.0), resumed):
            if gate is not resumed:
                for norm in norms[:i]:
                    gate.saw(norm)
            opens.append([gate.quiet])
            for norm in norms[i:]:
                gate.saw(norm)
                opens[-1].append(gate.quiet)
        assert opens[0] == opens[1]
        whole.saw(norms[i])
