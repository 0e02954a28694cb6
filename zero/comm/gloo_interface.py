"""Chooses the network interface over which gloo connects machines.

gloo listens on the address that the machine's own name has. On many machines /etc/hosts says that
this is 127.0.1.1, or the address of a network that other machines do not reach. Then the job hangs
at its start. So each rank takes the interface that reaches the machine of rank 0, which is the one
by which it has just connected to the job's store."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address

import psutil
import torch.distributed as dist

VARIABLE = "GLOO_SOCKET_IFNAME"
_ADDRESS, _MET = "zero_interface/address", "zero_interface/met"


def is_known() -> bool:
    """Whether no interface has to be chosen, because the user has named one, or because all ranks
    are on one machine.
    """
    ranks = [os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    return VARIABLE in os.environ or ranks[0] in (None, "1", ranks[1])


def choose(store: dist.Store, world_size: int) -> None:
    """Set `GLOO_SOCKET_IFNAME` to the interface that reaches the other machines. All ranks must
    call it.

    It stays unset if all ranks reach each other by the loopback.
    """
    own = _address_towards(os.environ["MASTER_ADDR"])
    if not ip_address(own).is_loopback:
        store.set(_ADDRESS, own)
    if store.add(_MET, 1) == world_size and not store.check([_ADDRESS]):
        store.set(_ADDRESS, own)
    if ip_address(own).is_loopback:  # on the machine of rank 0: any other machine shows the way out
        own = _address_towards(store.get(_ADDRESS).decode())
    if not ip_address(own).is_loopback:
        for name, addresses in psutil.net_if_addrs().items():
            if own in [each.address for each in addresses]:
                os.environ[VARIABLE] = name


def _address_towards(host: str) -> str:
    """This machine's address on the way to `host`. Nothing is sent."""
    family, kind, _, _, there = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(there)
        return way.getsockname()[0]
