"""tests/listeners.py sees every socket of a command, also of processes that hide from it as Ray's do."""

import os
import subprocess
import sys

import pytest
from listeners import Listener, beyond_loopback, watched

# Opens three sockets, and leaves when its input ends.
OPEN = """
import socket, sys, time
kept = [socket.socket(family, kind) for family, kind in (
    (socket.AF_INET, socket.SOCK_STREAM), (socket.AF_INET6, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_DGRAM)
)]
for one, address in zip(kept, ("127.0.0.1", "::", "0.0.0.0"), strict=True):
    one.bind((address, 0))
for one in kept[:2]:
    one.listen()
print(*(one.getsockname()[1] for one in kept), flush=True)
sys.stdin.read()
"""
# The child has lost the mark, as a process has that gave itself a title: its parent is there.
UNMARKED = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], env={})"
# The child has the mark, and its parent is gone.
DETACHED = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.5.0.1", "::1", "::ffff:127.0.0.1"])
def test_loopback(address):
    assert Listener("p", "tcp", address, 1).loopback


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.2", "::ffff:192.0.2.2", "fe80::1%eth0"])
def test_beyond_loopback(address):
    assert not Listener("p", "tcp", address, 1).loopback


@pytest.mark.parametrize("way", [[OPEN], [UNMARKED, OPEN], [DETACHED, OPEN]], ids=["itself", "unmarked", "detached"])
def test_every_socket_of_a_command_is_found(way):
    """The end of `watched` is a last look, and both processes still run then."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    other = subprocess.Popen([sys.executable, "-c", OPEN], **pipes)
    other.stdout.readline()
    with watched() as (environment, seen):
        process = subprocess.Popen([sys.executable, "-c", *way], env=os.environ | environment, **pipes)
        ports = [int(port) for port in process.stdout.readline().split()]
    for one in (process, other):
        one.communicate()
    found = {(one.protocol, one.address, one.port) for one in seen}
    assert found == {("tcp", "127.0.0.1", ports[0]), ("tcp", "::", ports[1]), ("udp", "0.0.0.0", ports[2])}
    assert {one.port for one in beyond_loopback(seen)} == set(ports[1:])


def test_what_goes_wrong_while_looking_is_raised(monkeypatch):
    monkeypatch.setattr("psutil.net_connections", lambda kind: 1 / 0)
    with pytest.raises(ZeroDivisionError), watched():
        pass
