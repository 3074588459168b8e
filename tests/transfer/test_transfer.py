"""Ring, slabs and activation store by themselves."""

import pytest
import tiny
import torch

from megatrain_rl.host.store import HostStore
from megatrain_rl.model.decoder import decoder_spec
from megatrain_rl.transfer.activations import ActivationStore
from megatrain_rl.transfer.grad_slabs import GradSlabPool
from megatrain_rl.transfer.lanes import Lanes
from megatrain_rl.transfer.weight_ring import WeightRing


@pytest.fixture
def spec():
    return decoder_spec(tiny.config(layers=5))


def filled_store(spec, device):
    store = HostStore(spec, torch.float32, pin=device == "cuda")
    for i, block in enumerate(spec.layers):
        store.begin_write(block).fill_(i + 1)
        store.end_write(block)
    return store


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
def test_ring_hands_out_the_order_it_was_told(spec, device, depth):
    ring = WeightRing(Lanes.on(torch.device(device)), torch.device(device), depth, spec.max_layer_numel, torch.float32)
    store = filled_store(spec, device)
    order = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
    for _ in range(2):
        ring.begin(store, [spec.layers[i] for i in order])
        for i in order:
            flat = ring.acquire(spec.layers[i])
            assert (flat == i + 1).all()
            ring.release(spec.layers[i])
        ring.park()  # the memory is gone until the next begin
    store.close()


def test_ring_does_not_wait_ahead_of_time(spec, device):
    """A block that a writer holds is waited for when it is acquired, not when its slot becomes free."""
    import threading

    ring = WeightRing(Lanes.on(torch.device(device)), torch.device(device), 2, spec.max_layer_numel, torch.float32)
    store = filled_store(spec, device)
    flat = store.begin_write(spec.layers[1])
    ring.begin(store, list(spec.layers))  # would hang here
    assert (ring.acquire(spec.layers[0]) == 1).all()
    ring.release(spec.layers[0])

    def finish():
        flat.fill_(42)
        store.end_write(spec.layers[1])

    writer = threading.Timer(0.2, finish)
    writer.start()
    assert (ring.acquire(spec.layers[1]) == 42).all()
    ring.release(spec.layers[1])
    assert (ring.acquire(spec.layers[2]) == 3).all()
    writer.join()
    store.close()


def test_ring_recovers_from_an_aborted_sweep(spec, device):
    ring = WeightRing(Lanes.on(torch.device(device)), torch.device(device), 2, spec.max_layer_numel, torch.float32)
    store = filled_store(spec, device)
    ring.begin(store, list(spec.layers))
    ring.acquire(spec.layers[0])  # and never released
    ring.abandon()
    ring.begin(store, list(reversed(spec.layers)))
    for i in reversed(range(5)):
        assert (ring.acquire(spec.layers[i]) == i + 1).all()
        ring.release(spec.layers[i])
    with pytest.raises(AssertionError):
        ring.begin(store, [spec.layers[0]])
        ring.acquire(spec.layers[1])
    store.close()


def test_reader_waits_for_the_writer_and_gets_its_error(spec):
    import threading

    store = filled_store(spec, "cpu")
    flat = store.begin_write(spec.layers[2])
    seen = []
    reader = threading.Thread(target=lambda: seen.append(store.read(spec.layers[2]).clone()))
    reader.start()
    assert (store.read(spec.layers[1]) == 2).all()  # other blocks are not held up
    flat.fill_(42)
    store.end_write(spec.layers[2])
    reader.join(timeout=10)
    assert (seen[0] == 42).all()
    store.begin_write(spec.layers[0])
    store.fail(OSError("disk on fire"))
    with pytest.raises(RuntimeError, match="weights are incomplete") as error:
        store.read(spec.layers[0])
    assert isinstance(error.value.__cause__, OSError)


def pool(spec, device, on_landed=lambda block, norm: None, num_slabs=3, slab_numel=1000):
    device = torch.device(device)
    return GradSlabPool(
        Lanes.on(device), device, num_slabs=num_slabs, slab_numel=slab_numel, dtype=torch.float32, on_landed=on_landed
    )


def test_slabs_push_and_pull(spec, device):
    landed = []
    slabs = pool(spec, device, lambda block, norm: landed.append((block.name, norm)))
    block = spec.layers[0]
    gradient = torch.randn(block.layout.numel, device=device)
    host = torch.zeros(block.layout.numel, pin_memory=device == "cuda")
    copy = gradient.clone()
    slabs.push(block, gradient, host)
    gradient.zero_()  # may be reused at once
    slabs.drain()
    assert torch.equal(host, copy.cpu())
    assert landed == [("layers.0", pytest.approx(copy.norm().item(), rel=1e-6))]
    for ahead in (False, True):  # what the slabs hold may be on its way before it is asked for
        gradient = torch.ones_like(copy)
        if ahead:
            slabs.prefetch_earlier(host)
        slabs.add_earlier(host, gradient)
        assert torch.equal(gradient, copy + 1)
    slabs.prefetch_earlier(host)  # and a sweep that failed here leaves nothing behind
    slabs.drain()
    slabs.push(block, copy + 1, host)
    slabs.drain()
    assert torch.equal(host, copy.cpu() + 1)
    slabs.close()


def test_worker_error_is_raised_once_on_the_caller(spec, device):
    def fail(block, norm):
        raise OSError(f"no place for {block.name}")

    slabs = pool(spec, device, fail)
    gradient = torch.zeros(spec.layers[0].layout.numel, device=device)
    host = torch.zeros(gradient.numel())
    slabs.push(spec.layers[0], gradient, host)
    with pytest.raises(RuntimeError, match="did not land") as error:
        slabs.drain()
    assert isinstance(error.value.__cause__, OSError) and "layers.0" in str(error.value.__cause__)
    slabs.drain()  # told once; the pool still works
    slabs.close()


def test_activations_come_back_as_they_went(device):
    store = ActivationStore(
        Lanes.on(torch.device(device)),
        torch.device(device),
        8,
        torch.float32,
        arena_bytes=1 << 23,
        pin=device == "cuda",
    )
    store.begin(3, [4, 6])
    tensors = {(s, p): torch.randn(t, 8, device=device) for s in range(3) for p, t in ((0, 4), (1, 6))}
    for (slot, pack), tensor in tensors.items():
        store.put(slot, pack, tensor)
    for (slot, pack), tensor in tensors.items():
        store.prefetch(slot, pack)
        assert torch.equal(store.take(slot, pack, forget=False), tensor)
        assert torch.equal(store.take(slot, pack, forget=True), tensor)
    store.prefetch(0, 0)  # forgotten: nothing is fetched before it is put again
    new = torch.randn(4, 8, device=device)
    store.put(0, 0, new)
    assert torch.equal(store.take(0, 0, forget=True), new)
    store.close()


def test_activation_region_is_reused_and_grows_without_doubling(device):
    store = ActivationStore(
        Lanes.on(torch.device(device)),
        torch.device(device),
        8,
        torch.float32,
        arena_bytes=1 << 23,
        pin=device == "cuda",
    )
    store.begin(2, [10])
    first = store._region.flat.data_ptr()
    store.begin(2, [7])
    assert store._region.flat.data_ptr() == first
    store.begin(2, [20])
    assert store._region.flat.numel() == 2 * 20 * 8
    store.close()
