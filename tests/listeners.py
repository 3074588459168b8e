"""Who can connect to a run: the TCP sockets on which its processes listen, from its start to its end.

    python tests/listeners.py COMMAND ...

prints them at the end, one line each, and exits with the command's status, or with 1 if one of them listens on another
address than loopback. The processes of the command are known by a variable in their environment, since Ray detaches
some of them.
"""

import ipaddress
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

VARIABLE = "MEGATRAIN_TESTS_RUN"
SAMPLE_SECONDS = 0.5


@dataclass(frozen=True, order=True)
class Listener:
    address: str
    port: int
    process: str = field(compare=False)

    @property
    def loopback(self) -> bool:
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1
        return (mapped or address).is_loopback


def listening(run: str) -> Iterator[Listener]:
    """The sockets on which the processes of `run` listen now."""
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or connection.pid is None:
            continue
        try:
            process = psutil.Process(connection.pid)
            if process.environ().get(VARIABLE) == run:
                yield Listener(connection.laddr.ip, connection.laddr.port, " ".join(process.cmdline())[:80])
        except psutil.Error:  # it has ended
            continue


@contextmanager
def watched() -> Iterator[tuple[dict[str, str], set[Listener]]]:
    """Yields an environment, and a set that gathers the sockets of every process that is started with it."""
    run, seen, stop = uuid.uuid4().hex, set(), threading.Event()

    def sample() -> None:
        while True:
            seen.update(listening(run))
            if stop.wait(SAMPLE_SECONDS):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield {VARIABLE: run}, seen
    finally:
        stop.set()
        thread.join()


def main() -> int:
    if not sys.argv[1:]:
        print(__doc__)
        return 2
    with watched() as (environment, seen):
        status = subprocess.run(sys.argv[1:], env=os.environ | environment).returncode
    for listener in sorted(seen):
        print("loopback" if listener.loopback else "OPEN    ", f"{listener.address}:{listener.port}", listener.process)
    print(
        f"{len(seen)} sockets listened, {sum(not listener.loopback for listener in seen)} of them beyond this machine"
    )
    return 1 if not all(listener.loopback for listener in seen) else status


if __name__ == "__main__":
    sys.exit(main())
