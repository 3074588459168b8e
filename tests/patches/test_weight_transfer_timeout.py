"""verl_patches/weight_transfer_timeout.py: without it the sender waits for ever; a healthy transfer is as before."""

import asyncio
import importlib.util
import inspect
import threading
import types
from pathlib import Path

import pytest
import torch
import verl
from patch_cases import OUTSIDE, asked

from verl_patches import ours, weight_transfer_timeout

pytest.importorskip("zmq")


def load() -> types.ModuleType:
    """The module by its file: its package refuses to be imported where there is no rollout engine."""
    file = Path(verl.__file__).parents[1] / (weight_transfer_timeout.MODULE.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location("bucketed_weight_transfer_by_file", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


patched = load()
weight_transfer_timeout.apply(patched)

WEIGHTS = [("a", torch.arange(100.0)), ("b", torch.ones(3, dtype=torch.bfloat16)), ("c", torch.zeros(200_000))]


@pytest.fixture(autouse=True)
def trainers_process(monkeypatch):
    """The process in which these tests send is that of a trainer of ours."""
    monkeypatch.setattr(ours, "_engine_lives_here", True)


@pytest.fixture
def handle(tmp_path) -> str:
    return f"ipc://{tmp_path}/socket"


def send(handle: str) -> None:
    sender = patched.BucketedWeightSender(zmq_handle=handle, bucket_size_mb=1, use_shm=True)
    asyncio.run(sender.async_send_weights(iter(WEIGHTS)))


def test_defect_is_still_there():
    source = inspect.getsource(patched.BucketedWeightSender._init_socket.__wrapped__)
    assert "zmq.REQ" in source and "TIMEO" not in source


@pytest.mark.timeout(60)
def test_an_engine_that_is_gone_ends_the_transfer(handle, monkeypatch):
    monkeypatch.setenv("MEGATRAIN_WEIGHT_TRANSFER_TIMEOUT", "0.5")
    with pytest.raises(RuntimeError, match=r"rollout engine.*0\.5 s.*MEGATRAIN_WEIGHT_TRANSFER_TIMEOUT"):
        send(handle)


def test_an_engine_that_fails_in_between_ends_the_transfer(handle, monkeypatch):
    monkeypatch.setenv("MEGATRAIN_WEIGHT_TRANSFER_TIMEOUT", "0.5")

    def receive() -> None:
        def fail(weights, is_last):
            raise ValueError("no such weight")

        receiver = patched.BucketedWeightReceiver(zmq_handle=handle, device=torch.device("cpu"), use_shm=True)
        with pytest.raises(BaseException):  # noqa: B017  (VERL's clean-up may put another error in its place)
            receiver.receive_weights(fail)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    with pytest.raises(RuntimeError, match=r"rollout engine.*MEGATRAIN_WEIGHT_TRANSFER_TIMEOUT"):
        send(handle)
    thread.join(10)
    assert not thread.is_alive()


def test_a_healthy_transfer_is_as_before(handle):
    got = {}

    def receive() -> None:
        receiver = patched.BucketedWeightReceiver(zmq_handle=handle, device=torch.device("cpu"), use_shm=True)
        receiver.receive_weights(lambda weights, is_last: got.update((n, t.clone()) for n, t in weights))

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    send(handle)
    thread.join(30)
    assert got.keys() == {"a", "b", "c"} and all(torch.equal(got[n], t) for n, t in WEIGHTS)


def test_a_bucket_that_is_too_small_names_its_setting(handle):
    def receive() -> None:
        receiver = patched.BucketedWeightReceiver(zmq_handle=handle, device=torch.device("cpu"), use_shm=True)
        receiver._init_socket()
        receiver._init_buffer()
        receiver._cleanup()

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    sender = patched.BucketedWeightSender(zmq_handle=handle, bucket_size_mb=1, use_shm=True)
    expected = r"rollout\.checkpoint_engine\.update_weights_bucket_megabytes=1 .*Weight big\("
    with pytest.raises(ValueError, match=expected):
        asyncio.run(sender.async_send_weights(iter([("big", torch.zeros(300_000))])))
    thread.join(10)


@pytest.mark.parametrize("value", ["soon", "0", "-3"])
def test_a_bad_limit_is_named(value, monkeypatch):
    monkeypatch.setenv("MEGATRAIN_WEIGHT_TRANSFER_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"MEGATRAIN_WEIGHT_TRANSFER_TIMEOUT={value}"):
        weight_transfer_timeout.limit_seconds()


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="BucketedWeightSender"):
        weight_transfer_timeout.apply(types.ModuleType(weight_transfer_timeout.MODULE))


def test_other_trainers_wait_as_without_the_patch(handle, monkeypatch):
    import zmq

    monkeypatch.setattr(ours, "_engine_lives_here", False)
    sender = patched.BucketedWeightSender(zmq_handle=handle, bucket_size_mb=1, use_shm=True)
    sender._init_socket()
    assert sender.socket.getsockopt(zmq.RCVTIMEO) == sender.socket.getsockopt(zmq.SNDTIMEO) == -1
    sender.socket.close(linger=0)


@pytest.mark.parametrize("version", OUTSIDE)
def test_nothing_outside_the_gate(version):
    assert weight_transfer_timeout.MODULE not in asked(version)
    assert weight_transfer_timeout.MODULE in asked("0.9.1")
