"""Deferred: a call that is put off, then made on a thread of its own, and waited for before its effect is needed.

Used by transfer_queue_start.py, and by our trainer for the import of the rollout server.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Deferred:
    """It holds one call at a time. name: the thread's name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._call: Callable[[], object] | None = None
        self._future: Future[object] | None = None
        self._thread: int | None = None

    def put_off(self, call: Callable[[], object]) -> None:
        """Keep `call` for later."""
        self._call = call

    def begin(self) -> None:
        """Start the call that was put off, if there is one."""
        call, self._call = self._call, None
        if call is None:
            return
        executor = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._future = executor.submit(self._run, call)
        executor.shutdown(wait=False)

    def forget(self) -> None:
        """Drop a call that was put off and has not begun."""
        self._call = None

    def finish(self) -> None:
        """Wait until the call has ended, and start it now if it has not begun. Its error is raised here, once.

        Within the call itself `finish` returns at once.
        """
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
