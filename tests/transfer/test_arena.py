"""DeviceReservation: what others empty or cut, the reserved segment stays until it is closed."""

import gc

import pytest
import torch

from megatrain_rl.transfer.arena import DeviceReservation

MIB = 1 << 20


def test_nothing_on_a_cpu():
    reservation = DeviceReservation(torch.device("cpu"), 100 * MIB)
    reservation.open()
    reservation.open()
    reservation.close()


@pytest.mark.gpu
def test_it_stays_until_it_is_closed():
    device = torch.device("cuda", torch.cuda.current_device())
    gc.collect()
    torch.cuda.empty_cache()
    # leaves 16 MiB of a segment free, where pieces fit better
    beside = torch.empty(4 * MIB, dtype=torch.uint8, device=device)
    before = torch.cuda.memory_reserved()
    reservation = DeviceReservation(device, 200 * MIB)
    held = []
    for step in (lambda: None, reservation.open, reservation.open):
        step()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved() - before)
    assert held == [200 * MIB] * 3
    large = torch.empty(190 * MIB, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_reserved() - before == 200 * MIB, "it is there to be cut"
    del large
    reservation.close()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    del beside
