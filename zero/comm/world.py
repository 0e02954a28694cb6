"""The job's default process group: creates it if the script has not done so, and answers questions
about its ranks.

Also which device this rank computes on, and groups of ranks by number.

[Note: groups of ranks]
job              all ranks.
world            the ranks with batches of their own, over which gradients are averaged.
shard group      the ranks over which a group is cut, consecutive ones: an all-gather or a
                 reduce-scatter is among these.
replicate group  the ranks that hold the same shard. A reduced shard is summed over these.
model group      the ranks that hold one copy of the model together, and work on the same batch.

The world and the shard group are the job, and each rank is alone in its replicate group, unless
`within` has made smaller groups. Each rank has the whole model, unless `split` has made smaller
worlds and model groups. Parameters that only every n-th rank has, such as experts that stay on
their ranks, have a world of these ranks (`every`)."""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from ipaddress import ip_address

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero.device import CPU, accelerator, is_accelerator, use
from zero.errors import UsageError

DEFAULT_TIMEOUT = timedelta(minutes=30)


def ranks_of_machine() -> int | None:
    """How many consecutive ranks of the job each machine has, as the launcher says, or None if it
    does not.
    """
    given = os.environ.get("LOCAL_WORLD_SIZE")
    return int(given) if given else None


@dataclass(frozen=True)
class Group:
    """Some ranks, by their numbers in the job, and this process's place among them."""

    rank: int
    ranks: Sequence[int]

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]]) -> Group:
        """The one of these groups that this process is in."""
        ranks = next(ranks for ranks in groups if dist.get_rank() in ranks)
        return cls(ranks.index(dist.get_rank()), ranks)

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def elsewhere(self) -> list[int]:
        """The places of those on other machines; none where the launcher does not tell."""
        size = ranks_of_machine()
        if size is None:
            return []
        own = self.ranks[self.rank] // size
        return [place for place, rank in enumerate(self.ranks) if rank // size != own]

    @cached_property
    def others(self) -> list[int]:
        """The places of all others, from the next one on, so that no two ranks send to the same one
        first.
        """
        return [(self.rank + step) % self.size for step in range(1, self.size)]


def compute_device() -> torch.device:
    """This rank's accelerator, even if the default group is gloo only: the engine makes groups of
    its own.

    The CPU if torch sees none, or none with collectives: gloo, which torch names for Apple's MPS,
    works on host memory."""
    device = accelerator(int(os.environ.get("LOCAL_RANK", 0)))
    return CPU if device is None or default_backend(device) == "gloo" else device


def default_timeout() -> timedelta:
    """How long a collective may wait for other ranks: `DEEPSPEED_TIMEOUT` minutes, else 30."""
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    return timedelta(minutes=float(minutes)) if minutes else DEFAULT_TIMEOUT


def group_timeout() -> timedelta:
    """The timeout of the default process group, made by the engine or by the script; else
    `default_timeout`.
    """
    world = dist.group.WORLD
    # A group that is a Python subclass, such as torchft's, names no devices, and has no options.
    if world is None or not world._device_types:
        return default_timeout()
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    return default_timeout() if options is None else options._timeout


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make the default process group unless there is one. A process without a launcher becomes the
    only rank.

    The arguments are those of `deepspeed.init_distributed`; the backend defaults to NCCL on a GPU
    and gloo on a CPU. `auto_mpi_discovery`, `distributed_port`, `verbose`, `dist_init_required` and
    `config` have no effect."""
    device = compute_device()
    use(device)
    if dist.is_initialized():
        return
    backend = default_backend(device)
    backend = dist_backend or (
        f"cpu:gloo,{device.type}:{backend}" if is_accelerator(device) else backend
    )
    if init_method is None and "RANK" not in os.environ and rank < 0:
        become_world_of_one()
    timeout, store = timeout or default_timeout(), None
    if init_method is None and rank < 0 and not knows_interface():
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        choose_interface(store, world_size)
    dist.init_process_group(
        backend,
        init_method=init_method,
        timeout=timeout,
        rank=rank,
        world_size=world_size,
        store=store,
    )


def become_world_of_one() -> list[str]:
    """Set the variables a launcher would have set for a single process, with a free port.

    Commands such as `llamafactory-cli` pass their environment's port on to torchrun, whose ranks
    would wait without end if it were 0. Returns the names of those that were not set.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    defaults = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    missing = [name for name in defaults if name not in os.environ]
    os.environ.update({name: str(defaults[name]) for name in missing})
    return missing


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in `group`; 0 before there is one."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD


def get_backend() -> str:
    """Name of the default group's backend, such as "gloo" or "nccl"."""
    return dist.get_backend()


def default_backend(device: torch.device) -> str:
    """The backend of `torch.distributed` for this kind of device: "nccl" for CUDA, "gloo" for the
    CPU.
    """
    return dist.get_default_backend_for_device(device)


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks in `group`; 1 before there is one."""
    return dist.get_world_size(group) if is_initialized() else 1


# -- the network interface over which gloo connects machines
#
# gloo listens on the address that the machine's own name has. On many machines /etc/hosts says that
# this is 127.0.1.1, or the address of a network that other machines do not reach. Then the job
# hangs at its start. So each rank takes the interface that reaches the machine of rank 0, which is
# the one by which it has just connected to the job's store.

INTERFACE = "GLOO_SOCKET_IFNAME"
_ADDRESS, _MET = "zero_interface/address", "zero_interface/met"


def knows_interface() -> bool:
    """Whether no interface has to be chosen, because the user has named one, or because all ranks
    are on one machine.
    """
    ranks = [os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    return INTERFACE in os.environ or ranks[0] in (None, "1", ranks[1])


def choose_interface(store: dist.Store, world_size: int) -> None:
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
                os.environ[INTERFACE] = name


def _address_towards(host: str) -> str:
    """This machine's address on the way to `host`. Nothing is sent."""
    family, kind, _, _, there = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(there)
        return way.getsockname()[0]


# -- which ranks share what, as a `torch.distributed.device_mesh.DeviceMesh` says; nothing is
# communicated
#
# [Note: dimensions]
# pp         pipeline stages: each rank has some of the layers.
# replicate  groups of ranks that hold the same shards.
# shard      ranks over which ZeRO cuts what each of them has of the model.
# tp         tensor parallelism: each rank has a part of each layer.
#
# `replicate` and `shard` together are the data-parallel ranks, each with batches of its own. The
# other two make a model group: ranks that hold one copy of the model together and work on the same
# batch.

_OTHER_NAMES = {"dp": "shard", "fsdp": "shard", "dp_shard": "shard", "dp_replicate": "replicate"}
DIMENSIONS = ("pp", "replicate", "shard", "tp")
_DATA = ("replicate", "shard")


def mesh_of_accelerate() -> DeviceMesh | None:
    """The mesh that the script's `Accelerator` has made of its `ParallelismConfig`, if that says
    how to shard.
    """
    state = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        return None
    mesh = getattr(state.AcceleratorState(), "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return mesh if {"dp_shard", "tp"} & {*names} else None


def sizes_of(mesh: DeviceMesh, world_size: int) -> dict[str, int]:
    """The size of each dimension of the note, by name, in the mesh's order.

    The names of accelerate (`dp_shard`), transformers (`fsdp`) and DeepSpeed (`dp`) are known too.
    Raises UsageError for any other dimension or order, and for a mesh that does not have all ranks
    of the job, in their order."""
    given = mesh.mesh_dim_names or ()
    names = tuple(_OTHER_NAMES.get(name, name) for name in given)
    if not names or names != tuple(name for name in DIMENSIONS if name in names):
        raise UsageError(
            f"mesh: the dimensions are {given}; name them 'pp', 'replicate', 'shard' and 'tp', in "
            "this order; each may be left out"
        )
    if mesh.mesh.flatten().tolist() != list(range(world_size)):
        product = " x ".join(map(str, mesh.mesh.shape))
        raise UsageError(
            f"mesh: {product} = {mesh.mesh.numel()} ranks; it must have all {world_size} of the "
            "job, in their order"
        )
    return dict(zip(names, mesh.mesh.shape, strict=True))


def groups(sizes: Mapping[str, int], of_data: bool) -> list[list[int]]:
    """The ranks of each data-parallel world, or of each model group, in the mesh's order."""
    order = sorted(range(len(sizes)), key=lambda number: (list(sizes)[number] in _DATA) is of_data)
    ranks = torch.arange(math.prod(sizes.values()), device="cpu")
    ranks = ranks.view(*sizes.values()).permute(order)
    size = math.prod(size for name, size in sizes.items() if (name in _DATA) is of_data)
    return ranks.reshape(-1, size).tolist()
