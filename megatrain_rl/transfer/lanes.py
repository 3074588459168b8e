"""Lanes: CUDA streams and events under one roof, and their absence on a CPU.

No other package creates a stream or an event. On a CPU a lane runs its work at once and a mark is always reached, so
the same code runs there in program order.
"""

from dataclasses import dataclass

import torch


class Mark:
    """A point in a lane's work, recorded after everything the lane was given so far."""

    def __init__(self, event: torch.cuda.Event | None):
        self._event = event

    def synchronize(self) -> None:
        """Block the host until the point is reached."""
        if self._event is not None:
            self._event.synchronize()


class Lane:
    """One CUDA stream, or program order on a CPU. Use as a context manager to give it work."""

    def __init__(self, stream: torch.cuda.Stream | None):
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._previous = torch.cuda.current_stream(self._stream.device)
            torch.cuda.set_stream(self._stream)

    def __exit__(self, *exc) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._previous)

    def record(self) -> Mark:
        if self._stream is None:
            return Mark(None)
        event = torch.cuda.Event()
        event.record(self._stream)
        return Mark(event)

    def wait(self, mark: Mark) -> None:
        """Later work of this lane starts after `mark`; the host does not wait."""
        if self._stream is not None and mark._event is not None:
            self._stream.wait_event(mark._event)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


@dataclass(frozen=True)
class Lanes:
    """The lanes of a streamed step.

    compute: kernels, on the stream that was current when the lanes were made.
    upload: host to device; weights of the next layer cross while compute works on this one.
    fetch: host to device; layer inputs of the next pack. Apart from `upload`, where a pack would queue behind a whole
        layer's weights.
    download: device to host; layer inputs and gradients leave while compute goes on. The link carries both directions
        at once.
    """

    compute: Lane
    upload: Lane
    fetch: Lane
    download: Lane

    @classmethod
    def on(cls, device: torch.device) -> "Lanes":
        if device.type != "cuda":
            return cls(Lane(None), Lane(None), Lane(None), Lane(None))
        return cls(Lane(torch.cuda.current_stream(device)), *(Lane(torch.cuda.Stream(device)) for _ in range(3)))

    def synchronize(self) -> None:
        for lane in (self.compute, self.upload, self.fetch, self.download):
            lane.synchronize()
