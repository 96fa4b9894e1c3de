"""Ranks as on machines of their own, which have nothing in common but a network that can fail.

Each rank has a network namespace; a cable (veth) leads from it to a switch (a bridge), which is in
a namespace where no rank is:

    rank 0: 10.0.0.1 ──── port0 ┐
    rank 1: 10.0.0.2 ──── port1 ├ switch
    rank 2: 10.0.0.3 ──── port2 ┘

A port that leaves the switch has its carrier still: what comes there is dropped and nobody is told,
as when a machine loses its power behind a switch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

from pipedream2bw import _C
from tests.runs.transports import be_on_machine

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
CARD = "eth0"
STORE_PORT = 29500
"""Of rank 0, in whose namespace nobody else is."""


@contextlib.contextmanager
def switch() -> Iterator[int]:
    """The process in whose namespace the switch is, for as long as that is needed.

    Raises:
        OSError: no namespace can be made here, or no switch in it.
    """
    makes = "ip link add switch type bridge && ip link set switch up && echo made && exec cat"
    process = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", makes],
        stdin=subprocess.PIPE,  # its end ends the process too
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        told = process.stdout.readline()
        if told != "made\n":
            raise OSError(told + process.stdout.read())
        yield process.pid
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def on_network(rank: int, world: int, at: int, run: Callable[..., Any], *args: Any) -> Any:
    """``run(rank, world, *args)`` on a machine of its own, as torchrun would; for ``run_ranks``.

    Args:
        at: the switch's process.
    """
    _enter(at)
    be_on_machine(rank)
    _C.SharedRing.create = staticmethod(lambda *args: None)  # type: ignore[method-assign]
    port = f"port{rank}"
    _ip("link", "add", CARD, "type", "veth", "peer", "name", port, "netns", str(at))
    _ip_at(at, "link", "set", port, "master", "switch", "up")
    _ip("address", "add", f"10.0.0.{rank + 1}/24", "dev", CARD)
    _ip("link", "set", CARD, "up")
    _ip("link", "set", "lo", "up")
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": str(STORE_PORT),
        "GLOO_SOCKET_IFNAME": CARD,
    }
    return run(rank, world, *args)


def unplug(rank: int, at: int) -> None:
    """From now on this rank's packets reach nobody, and nobody's reach it."""
    _ip_at(at, "link", "set", f"port{rank}", "nomaster")


def _enter(at: int) -> None:
    """Brings this process, which has no threads yet, into a new network of the switch's user."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{at}/ns/user", "rb") as user:
        failed = libc.setns(user.fileno(), _CLONE_NEWUSER) or libc.unshare(_CLONE_NEWNET)
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _ip_at(at: int, *arguments: str) -> None:
    subprocess.run(["nsenter", f"--net=/proc/{at}/ns/net", "ip", *arguments], check=True)
