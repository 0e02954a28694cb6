"""Imitates a machine that computes nothing, on which the engine runs as one of many ranks.

The compute device is torch's `meta` device, whose tensors have shapes but no memory. Large tensors
in host memory are real, but their pages are never touched, because `Memory` skips every operation
on them. Collectives, streams, pinned memory and files only count. While the context `imitated` is
active, they replace the originals in torch and in each engine module that has imported their
names."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import math
import mmap
import os
import platform
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from zero import build
from zero import device as zero_device
from zero.comm import communicator, traffic, watchdog, world
from zero.comm.communicator import Communicator
from zero.comm.control import Channel, Control
from zero.comm.traffic import READ, WRITTEN
from zero.config import AioConfig, table
from zero.core.forward_writes import ForwardWrites
from zero.offload import nvme, pinned, tiers
from zero.optim import adam_cpu, rounding
from zero.parallel.experts import DispatchedExperts
from zero.tools.estimate.calls import FILLS, META, derived, is_on_device, tensors_in
from zero.tools.estimate.traffic import CALLS, COMPUTE, FED, OPERATIONS, TOUCHED

DEVICE, HOST, DISK = "device", "host", "disk"
# The part of host memory that is buffers for transfers.
BUFFERS = "buffers"
# The place of tensors inside these buffers. The buffers themselves are counted.
IN_BUFFER = "in a buffer"
# Operations on host tensors of at most this many elements are really executed, for example for the
# checksum of each parameter.
COMPUTED = 1 << 16

_aten = torch.ops.aten


class Memory(TorchDispatchMode):
    """Counts the bytes of all storages, from the operation that creates them until they are freed.

    Attributes:
        live: the current bytes, by place and part.
        most: the largest number of bytes so far, by place and part.
        fullest: by place, the parts at the fullest moment so far.
        part: the part to which new memory belongs.
        cause: the cause of current traffic.
        done: what has been moved and computed so far, by (link, cause).
    """

    def __init__(self, part: str):
        super().__init__()
        self.part = self.cause = part
        self.live: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.most: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.fullest: dict[str, dict[str, int]] = {DEVICE: {}, HOST: {}, DISK: {}}
        self.done: Counter[tuple[str, str]] = Counter()
        self._peaks: Counter[str] = Counter()
        # Place, part and bytes, by storage, and what calls `_forget` when the storage is freed.
        self._known: dict[int, tuple[str, str, int]] = {}
        self._freed: dict[int, weakref.ref] = {}

    # -- bytes

    def forget(self) -> None:
        """Start to look for the fullest moment, and for the maximum of each part."""
        self._peaks.clear()
        for place in self.fullest:
            self.add(place, self.part, 0)
        self.most = copy.deepcopy(self.live)

    def add(self, place: str, part: str, nbytes: int) -> None:
        """Count bytes of a tensor, or bytes that belong to no tensor and are never freed.

        They are negative when they are freed.
        """
        parts = self.live[place]
        parts[part] += nbytes
        self.most[place][part] = max(self.most[place][part], parts[part])
        if (total := parts.total()) >= self._peaks[place] and nbytes >= 0:
            self._peaks[place] = total
            self.fullest[place] = dict(parts)

    def note(self, tensor: torch.Tensor, place: str | None = None) -> None:
        """Count the tensor's storage unless it is known. `place` defaults to its device."""
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._known:
            place = place or (DEVICE if is_on_device(tensor) else HOST)
            nbytes = 0 if place == IN_BUFFER else storage.nbytes()
            self._known[key] = (place, self.part, nbytes)
            self.add(place, self.part, nbytes)
            self._freed[key] = weakref.ref(storage, lambda _: self._forget(key))

    def label(self, tensor: torch.Tensor | None, part: str) -> None:
        """From now on, count the tensor's storage as `part`."""
        if tensor is None or (key := tensor.untyped_storage()._cdata) not in self._known:
            return
        place, before, nbytes = self._known[key]
        if before != part:
            self._known[key] = (place, part, nbytes)
            self.add(place, before, -nbytes)
            self.add(place, part, nbytes)

    def place_of(self, tensor: torch.Tensor) -> str:
        known = self._known.get(tensor.untyped_storage()._cdata)
        return HOST if known is None else known[0]

    def resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            place, part, before = self._known[storage._cdata]
            self._known[storage._cdata] = (place, part, storage.nbytes())
            self.add(place, part, storage.nbytes() - before)

    def _forget(self, key: int) -> None:
        place, part, nbytes = self._known.pop(key)
        del self._freed[key]
        self.add(place, part, -nbytes)

    # -- operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch._dynamo would take part in each call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if DTensor in types:  # it calls again, with this rank's parts
            return NotImplemented
        kwargs = dict(kwargs or {})
        self.done[COMPUTE, CALLS] += 1
        if func.is_view:
            out = func(*args, **kwargs)
            for leaf in tensors_in(out):
                self.note(leaf)
            return out
        is_pinned = kwargs.pop("pin_memory", False)
        out, call = derived(self._call, func, args, kwargs)
        self.done[COMPUTE, OPERATIONS] += call.operations
        self.done[COMPUTE, FED if call.operations else TOUCHED] += call.touched
        before, self.part = self.part, "activations" if is_pinned else self.part
        for leaf in tensors_in(out):
            self.note(leaf)
        self.part = before
        return out

    def _call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        tensors = tensors_in((args, kwargs))
        if func is _aten._local_scalar_dense.default and is_on_device(args[0]):
            return 0.0 if args[0].is_floating_point() else 0
        if getattr(func, "overloadpacket", None) is _aten._grouped_mm:
            # torch's formula for shapes only accepts bf16
            narrow = (each.bfloat16() for each in args[:2])
            return func(*narrow, *args[2:], **kwargs).to(args[0].dtype)
        if func in FILLS and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            shape = func(*args, **kwargs | {"device": META})
            return func(*args, **kwargs) if shape.numel() <= COMPUTED else _on_host(shape)
        on_device = any(map(is_on_device, tensors))
        target = kwargs.get("device")
        leaves = on_device and target is not None and torch.device(target).type == "cpu"
        is_large = any(not is_on_device(each) and each.numel() > COMPUTED for each in tensors)
        mixed = on_device and not all(map(is_on_device, tensors)) and func._schema.is_mutable
        if not (leaves or is_large or mixed):
            return func(*args, **kwargs)
        return self._skip(func, args, kwargs, torch.device(target) if target else None)

    def _skip(self, func: Any, args: tuple, kwargs: dict, target: torch.device | None) -> Any:
        """Return only the shape of the result, without touching host memory."""
        schema = func._schema
        if schema.is_mutable:
            if not schema.returns:
                return None
            for argument, value in zip(schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    return value
            return kwargs["out"]
        given = tensors_in((args, kwargs))
        target = target or next((each.device for each in given if each.dim()), given[0].device)
        args, kwargs = tree_map_only(torch.Tensor, _shape_on_device, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        out = func(*args, **kwargs)
        return out if target.type == META.type else tree_map_only(torch.Tensor, _on_host, out)


def _shape_on_device(tensor: torch.Tensor) -> torch.Tensor:
    if is_on_device(tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    # Flags and indices are read, and decide what the engine does next.
    if tensor.nbytes <= COMPUTED:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    # Zeros that take no memory until they are written to: torch.zeros would write them, and the
    # codes of 8-bit moments are large.
    pages = memoryview(mmap.mmap(-1, tensor.nbytes))
    return torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)


# -- what a machine has


class _Done:
    """Work, a stream or an event, which completes immediately. It keeps its object until then."""

    def __init__(self, *kept: Any):
        self._kept = kept

    def __enter__(self) -> _Done:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def record_event(self) -> _Done:
        return self

    def wait(self, *_: object) -> None:
        self._kept = ()

    wait_event = wait_stream = synchronize = wait

    def query(self) -> bool:
        """Act as if the work were late, so that more buffers are in flight."""
        return False


class _File:
    """A rank's file, as the tiers see it. Reads and writes are counted."""

    def __init__(self, memory: Memory, settings: AioConfig):
        self._memory = memory
        self._settings = settings
        self._bounced = 0

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with _disable_current_modes():
            tensor = torch.empty(numel, dtype=dtype)
        self._memory.note(tensor, DISK)
        return tensor

    zeros = empty

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._memory.place_of(tensor) == DISK

    def read(self, source: torch.Tensor, target: torch.Tensor) -> _Done:
        self._move(READ, source, target)
        return _Done(target)

    def write(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Callable[[], None] | None = None,
    ) -> _Done:
        self._move(WRITTEN, target, source)
        return _Done(source)

    def _move(self, link: str, mapped: torch.Tensor, host: torch.Tensor) -> None:
        self._memory.done[link, self._memory.cause] += mapped.nbytes
        if self._memory.place_of(host) == HOST:
            # Direct I/O needs an aligned buffer for each request in flight.
            size = nvme.request_bytes(self._settings)
            most = min(self._settings.thread_count, math.ceil(host.nbytes / size)) * size
            if most > self._bounced:
                self._memory.add(HOST, BUFFERS, most - self._bounced)
                self._bounced = most


# -- the machine


@contextlib.contextmanager
def imitated(memory: Memory, rank: int, ranks: int, of_machine: int) -> Iterator[None]:
    """Context in which this process is rank `rank` of `ranks`, with `of_machine` ranks on each
    machine.

    Raises RuntimeError if the process already has a process group.
    """
    new_block, logger = pinned.new_block, logging.getLogger("zero")
    with contextlib.ExitStack() as stack:
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        stack.enter_context(mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(of_machine)}))
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        substitutes = [
            *_substitutes_of_ranks(of_machine),
            *_substitutes_of_tensors(memory),
            *_substitutes_of_experts(),
            *_substitutes_on_host(memory),
        ]
        modules = [module for key, module in sys.modules.items() if key.startswith("zero.")]
        for owner, name, substitute in substitutes:
            original = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, substitute))
            for module in modules:
                # Only what a module has imported under this name.
                if module.__dict__.get(name) is original:
                    stack.enter_context(mock.patch.object(module, name, substitute))
        # A mesh looks up the torch module of its device type.
        stack.enter_context(mock.patch.object(torch, META.type, torch.cpu, create=True))
        # The tiers' tensors are counted as tensors, unlike those in reused buffers.
        of_tier = mock.patch.object(tiers, "new_block", lambda size, pin: new_block(size, False))
        stack.enter_context(of_tier)
        stack.enter_context(memory)
        yield


Substitute = tuple[Any, str, Any]  # owner, name, and the replacement


def _substitutes_of_ranks(of_machine: int) -> list[Substitute]:
    new_group, alone, stream = Communicator._new_group, watchdog.Watchdog, _Done()

    def exchange(control: Control, act: Callable[[], Any]) -> list[Any]:
        value = act()
        if isinstance(value, tuple) and value[:1] == (platform.node(),):  # the machine of each rank
            return [(platform.node(), each // of_machine) for each in range(control.world_size)]
        return [value] * control.world_size

    return [
        (Communicator, "_new_group", lambda comm, groups, *_: new_group(comm, groups, "fake")),
        (Control, "exchange", exchange),
        (Channel, "_connect", lambda *_: None),
        (Channel, "all_gather", lambda channel, own, *_: [own] * channel.world_size),
        (communicator, "_communicators", {}),
        (world, "compute_device", lambda: META),
        # In a job of one rank, the watchdog has nobody to wait for.
        (watchdog, "Watchdog", lambda rank, ranks, *rest: alone(0, 1, *rest)),
        (watchdog, "end_with_launcher", lambda: None),
        (zero_device, "use", lambda device: None),
        (table, "announce", lambda *_: None),
        (build, "tell_time_of_files", lambda *_: None),
        # Only the first step looks for weights that a forward writes to, and here none does.
        (ForwardWrites, "shown", lambda *_: None),
        (ForwardWrites, "_rest", lambda *_: None),
        (torch.accelerator, "current_stream", lambda *_: stream),
        (torch.accelerator, "synchronize", lambda *_: None),
        (torch.accelerator, "get_memory_info", lambda *_: (0, 0)),
    ]


def _attention(
    plain: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Fused attention, which torch does not use on the meta device. With a mask that needs a
    gradient, torch uses it nowhere.
    """
    tensors = (query, key, value)
    if attn_mask is not None and attn_mask.requires_grad:
        return plain(*tensors, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty(attn_mask.shape, dtype=query.dtype, device=META)
    fused = _aten._scaled_dot_product_flash_attention_for_cpu
    return fused(*tensors, 0.0, is_causal, attn_mask=attn_mask, scale=options.get("scale"))[0]


def _substitutes_of_tensors(memory: Memory) -> list[Substitute]:
    resize, make, functional = torch.UntypedStorage.resize_, torch.tensor, torch.nn.functional
    optimizer = importlib.import_module("torch.optim.optimizer")
    foreach = optimizer._get_foreach_kernels_supported_devices

    def resize_counted(storage: torch.UntypedStorage, nbytes: int) -> Any:
        out = resize(storage, nbytes)
        memory.resized(storage)
        return out

    def tensor_with_values(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        made = make(data, **options, device="cpu")
        return made if device is None else made.to(device)

    def address(tensor: torch.Tensor) -> int:
        start = tensor.storage_offset() * tensor.itemsize
        return (tensor.untyped_storage()._cdata << 40) + start

    def is_pinned(tensor: torch.Tensor, *_: Any) -> bool:
        return tensor.device.type == "cpu" and memory.place_of(tensor) != DISK

    def autocast_of(original: Callable[..., Any]) -> Callable[..., Any]:
        """torch has no autocast for the meta device."""

        def call(device_type: str = "cuda", *args: Any, **options: Any) -> Any:
            return original("cpu" if device_type == META.type else device_type, *args, **options)

        return call

    attention = functools.partial(_attention, functional.scaled_dot_product_attention)
    autocast = ("autocast", "is_autocast_enabled", "get_autocast_dtype")
    return [
        *((torch, name, autocast_of(getattr(torch, name))) for name in autocast),
        (torch, "Stream", _Done),
        (torch, "tensor", tensor_with_values),
        (torch.UntypedStorage, "data_ptr", lambda each: each._cdata << 40 if each.nbytes() else 0),
        (torch.UntypedStorage, "resize_", resize_counted),
        (torch.Tensor, "data_ptr", address),
        (torch.Tensor, "is_meta", False),  # the engine refuses meta tensors in a model
        (torch.Tensor, "is_pinned", is_pinned),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
        (functional, "scaled_dot_product_attention", attention),
        (optimizer, foreach.__name__, lambda: [*foreach(), META.type]),
    ]


def _substitutes_of_experts() -> list[Substitute]:
    """With expert parallelism, the tokens' values decide how many go to each rank. Here every rank
    gets the same number.
    """

    def agree_evenly(
        self: DispatchedExperts, chosen: torch.Tensor
    ) -> tuple[list[int], list[int], torch.Tensor]:
        ranks = self.comm.shard_group.size
        sizes = [len(chosen) // ranks + (rank < len(chosen) % ranks) for rank in range(ranks)]
        received = [sizes[self.comm.shard_group.rank]] * ranks
        return sizes, received, chosen.new_zeros(sum(received))

    own: list[Substitute] = [(DispatchedExperts, "agree", agree_evenly)]
    try:
        from transformers.distributed.expert_parallel import AllToAllEP
    except ImportError:  # releases without it
        return own
    dispatch = AllToAllEP._dispatch_tokens

    def dispatch_evenly(self: Any, hidden: torch.Tensor, index: torch.Tensor, *rest: Any) -> Any:
        ranks = self.ep_mesh.size()
        pairs = math.ceil(len(hidden) / self.tp_mesh.size()) * index.shape[-1]
        sent = [pairs // ranks + (rank < pairs % ranks) for rank in range(ranks)]
        sizes = sent, [sent[0]] * ranks
        with mock.patch.object(torch.Tensor, "tolist", lambda _: sizes):
            return dispatch(self, hidden, index, *rest)

    return [*own, (AllToAllEP, "_dispatch_tokens", dispatch_evenly)]


def _substitutes_on_host(memory: Memory) -> list[Substitute]:
    files: dict[str, _File] = {}
    new_block, frombuffer = pinned.new_block, torch.frombuffer
    # Memory of reused buffers, which are counted instead of the tensors in them.
    buffers = weakref.WeakSet[mmap.mmap]()

    def scratch_file(folder: str, aio: AioConfig) -> _File:
        return files.setdefault(repr(aio), _File(memory, aio))

    def block_of_buffer(size: int, pin: bool) -> memoryview:
        memory.add(HOST, BUFFERS, size)
        block = new_block(size, pin=False)
        buffers.add(cast(mmap.mmap, block.obj))
        return block

    def tensor_in(block: memoryview, **options: Any) -> torch.Tensor:
        tensor = frombuffer(block, **options)
        memory.note(tensor, IN_BUFFER if block.obj in buffers else HOST)
        return tensor

    def store(_: Any, target: torch.Tensor, values: torch.Tensor, *rest: Any) -> None:
        # Blocks are rounded one at a time, so one of them shows how much memory is needed.
        target.copy_(values)
        block = values[: rounding.at_a_time(values.device)]
        rounding.rounded(block, torch.empty_like(block, dtype=torch.int32))

    def count(link: str, nbytes: int) -> None:
        memory.done[link, memory.cause] += nbytes

    return [
        (torch, "frombuffer", tensor_in),
        (traffic, "_count", count),
        (pinned, "new_block", block_of_buffer),
        (tiers, "scratch_file", scratch_file),
        (tiers, "_staging", tiers._Staging()),
        (rounding.StochasticRounding, "store", store),
        (adam_cpu, "adam", lambda *_, **__: None),
        (adam_cpu, "is_compiled", lambda: True),
    ]
