"""Deferred: a call that is put off, made on a thread of its own, and over before anybody needs what it makes."""

import threading
from collections.abc import Callable
from concurrent.futures import Future


class Deferred:
    """One call at a time. name: of the thread, which does not keep the interpreter from ending."""

    def __init__(self, name: str):
        self._name = name
        self._changed = threading.Lock()
        self._call: Callable[[], object] | None = None
        self._future: Future[object] | None = None
        self._thread: threading.Thread | None = None

    def put_off(self, call: Callable[[], object]) -> None:
        """Keep `call` for `begin` or `finish`."""
        self._call = call

    def begin(self) -> None:
        """Make the call that was put off; nothing without one."""
        with self._changed:
            call, self._call = self._call, None
            if call is None:
                return
            self._future = Future()
            self._thread = threading.Thread(target=_run, args=(call, self._future), name=self._name, daemon=True)
            self._thread.start()

    def forget(self) -> None:
        """Drop the call that was put off and has not begun: it will not be needed."""
        self._call = None

    def finish(self) -> None:
        """Wait until the call has ended, begun now if it was not. Its error is raised to the first who waits, and once.

        Called within the call itself it does nothing.
        """
        if threading.current_thread() is self._thread:
            return
        self.begin()
        future = self._future
        if future is None:
            return
        error = future.exception()  # waits
        with self._changed:
            first = self._future is future
            if first:
                self._future = None
        if error is not None and first:
            raise error


def _run(call: Callable[[], object], future: "Future[object]") -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
