"""Deferred: a call that is put off, made on a thread of its own, and over before anybody needs what it makes."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Deferred:
    """One call at a time. name: of the thread."""

    def __init__(self, name: str):
        self._name = name
        self._call: Callable[[], object] | None = None
        self._future: Future[object] | None = None
        self._thread: int | None = None

    def put_off(self, call: Callable[[], object]) -> None:
        self._call = call

    def begin(self) -> None:
        """Make the call that was put off; nothing without one."""
        call, self._call = self._call, None
        if call is None:
            return
        executor = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._future = executor.submit(self._run, call)
        executor.shutdown(wait=False)

    def forget(self) -> None:
        """The call that was put off and has not begun will not be needed."""
        self._call = None

    def finish(self) -> None:
        """Until the call has ended, begun now if it was not; raises its error, once. Within the call itself: nothing."""
        if self._thread == threading.get_ident():
            return
        self.begin()
        future, self._future = self._future, None
        if future is not None:
            future.result()

    def _run(self, call: Callable[[], object]) -> None:
        self._thread = threading.get_ident()
        try:
            call()
        finally:
            self._thread = None
