"""HostRegion where CUDA refuses to pin."""

import pytest
import torch

from megatrain_rl.host import pinned

pytestmark = pytest.mark.gpu


def test_refused_pinning_is_a_warning_and_no_more(caplog):
    """CUDA refuses the same memory twice; the region stays pageable and the next kernel does not report the refusal."""
    region = pinned.HostRegion(1 << 20, torch.float32, pin=True)
    assert region.pinned
    assert not pinned._register(region.flat)
    assert "pinning" in caplog.text
    assert torch.ones(1000, device="cuda").add_(1).sum().item() == 2000
    region.close()
