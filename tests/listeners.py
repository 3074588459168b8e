"""Who can connect to a run: the sockets on which its processes listen, from its start to its end.

    python tests/listeners.py COMMAND ...

prints them at the end, one line each, and exits with the command's status, or with 1 if one of them listens on another
address than loopback. A process belongs to the command if it has the command's mark in its environment, or descends
from one that has: Ray detaches some of its processes, and a process that gives itself a title writes over its
environment. UDP sockets that are bound and not connected count as listening.
"""

import contextlib
import ipaddress
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

VARIABLE = "MEGATRAIN_TESTS_RUN"
SAMPLE_SECONDS = 0.5


@dataclass(frozen=True, order=True)
class Listener:
    """process: the title that it has given itself, or its command line, without the program's folder."""

    process: str
    protocol: str
    address: str
    port: int

    @property
    def loopback(self) -> bool:
        address = ipaddress.ip_address(self.address.partition("%")[0])  # fe80::1%eth0
        mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1
        return (mapped or address).is_loopback


class _Sampler:
    """Looks at the sockets of the processes that `run` marks, on a thread of its own, until `stop`."""

    def __init__(self, run: str):
        self._run = run
        self._processes: set[psutil.Process] = set()
        self._seen: dict[tuple, Listener] = {}
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._sample, name="listeners", daemon=True)
        self._thread.start()

    def stop(self) -> list[Listener]:
        """Every listener seen since the start. Raises what went wrong while looking."""
        self._ended.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return sorted(self._seen.values())

    def _sample(self) -> None:
        try:
            while not self._ended.wait(SAMPLE_SECONDS):
                self._look()
            self._look()  # the last one sees what still runs
        except BaseException as error:
            self._error = error

    def _look(self) -> None:
        for found in psutil.net_connections("inet"):
            if found.pid is None or not _listens(found):
                continue
            with contextlib.suppress(psutil.Error):  # it has ended
                process = psutil.Process(found.pid)
                if self._belongs(process):
                    self._note(process, found)

    def _belongs(self, process: psutil.Process) -> bool:
        """Once found, a process is kept: its parent may end, and its environment may be written over."""
        if process not in self._processes:
            if not any(one in self._processes or self._is_marked(one) for one in (process, *process.parents())):
                return False
            self._processes.add(process)
        return True

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(VARIABLE) == self._run
        except (psutil.Error, OSError):
            return False

    def _note(self, process: psutil.Process, found) -> None:
        key = (process, found.type, found.laddr)
        own = {(one.type, one.laddr) for one in process.net_connections("inet")}
        if key not in self._seen and key[1:] not in own:
            return  # it was forked a moment ago and had its parent's sockets then
        program, *arguments = " ".join(process.cmdline()).split() or [""]
        title = " ".join([Path(program).name, *arguments])[:80]
        if key in self._seen and title in ("", "ray::IDLE"):
            return  # what it was says more
        protocol = "udp" if found.type == socket.SOCK_DGRAM else "tcp"
        self._seen[key] = Listener(title, protocol, found.laddr.ip, found.laddr.port)


def _listens(connection) -> bool:
    open_to_senders = connection.type == socket.SOCK_DGRAM and not connection.raddr
    return connection.status == psutil.CONN_LISTEN or open_to_senders


@contextlib.contextmanager
def watched() -> Iterator[tuple[dict[str, str], list[Listener]]]:
    """Yields an environment, and a list that has at the end the sockets of every process that was started with it."""
    run, seen = uuid.uuid4().hex, []
    sampler = _Sampler(run)
    try:
        yield {VARIABLE: run}, seen
    finally:
        seen += sampler.stop()


def beyond_loopback(listeners: list[Listener]) -> list[Listener]:
    return [listener for listener in listeners if not listener.loopback]


def main() -> int:
    if not sys.argv[1:]:
        print(__doc__)
        return 2
    with watched() as (environment, seen):
        status = subprocess.run(sys.argv[1:], env=os.environ | environment).returncode
    for listener in seen:
        place = "loopback" if listener.loopback else "OPEN    "
        print(place, listener.protocol, f"{listener.address}:{listener.port}", listener.process)
    beyond = len(beyond_loopback(seen))
    print(f"{len(seen)} sockets listened, {beyond} of them beyond this machine")
    return 1 if beyond else status


if __name__ == "__main__":
    sys.exit(main())
