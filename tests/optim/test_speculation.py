"""When an update may start before its norm is known: only where a wrong guess is unlikely, and by norms alone."""

import json

import pytest

from megatrain_rl.optim.speculation import SpeculationGate


@pytest.mark.parametrize("limit", [None, 0, 0.0])
def test_open_without_a_limit(limit):
    gate = SpeculationGate(limit)
    assert gate.open and gate.limit == float("inf")
    gate.saw(1e30)
    assert gate.open


def test_closed_without_history():
    gate = SpeculationGate(1.0)
    assert not gate.open
    gate.saw(0.5)
    assert gate.open


@pytest.mark.parametrize("norm, is_open", [(0.0, True), (1.79, True), (1.81, False), (2.0, False), (50.0, False)])
def test_a_norm_near_the_limit_closes_it(norm, is_open):
    gate = SpeculationGate(2.0)
    assert gate.limit == 2.0
    gate.saw(0.1)
    gate.saw(norm)
    assert gate.open is is_open


def test_four_quiet_norms_reopen_it():
    gate = SpeculationGate(1.0)
    gate.saw(3.0)
    for _ in range(3):
        gate.saw(0.2)
        assert not gate.open
    gate.saw(0.2)
    assert gate.open


def test_memory_survives_a_checkpoint():
    """Through JSON, at every length: a gate that resumes decides like the one that went on."""
    norms = [0.1, 0.95, 0.3, 0.2, 0.1 + 0.2, 0.4, 7.0, 0.1, 0.1, 0.1, 0.1]
    whole = SpeculationGate(1.0)
    for i in range(len(norms)):
        resumed = SpeculationGate(1.0)
        resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        assert resumed.state_dict() == whole.state_dict()
        opens = []
        for gate in (SpeculationGate(1.0), resumed):
            if gate is not resumed:
                for norm in norms[:i]:
                    gate.saw(norm)
            opens.append([gate.open])
            for norm in norms[i:]:
                gate.saw(norm)
                opens[-1].append(gate.open)
        assert opens[0] == opens[1]
        whole.saw(norms[i])
