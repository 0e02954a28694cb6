"""Exports the whole model of a running engine from its shards: weight by weight in bounded memory,
as a model folder, or as a state dict.

This file does not depend on training, that is, on hooks or gradients.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from zero.checkpoint.files import TensorSpec, bytes_of
from zero.checkpoint.models import MODEL_FILE, write_model
from zero.checkpoint.state import model_config, plain_tensors, require_values, saved_places
from zero.comm.communicator import Communicator
from zero.comm.work import Pending
from zero.core.layout import PIPELINE_PLACE
from zero.core.param_group import ParamGroup, owning_group
from zero.core.quantized_weights import wraps_tensors
from zero.core.sharded_param import ShardedParameter, cut_of, local
from zero.errors import UsageError, size
from zero.optim.sharded_optimizer import precise_values
from zero.threads import EngineThread

logger = logging.getLogger("zero")

T = TypeVar("T")


# For each group, the version of its values, and weak references to whole parameters that were
# handed out to be saved.
_Copies = list[Callable[[], torch.Tensor | None]]
_copies: WeakKeyDictionary[ParamGroup, tuple[int, _Copies]] = WeakKeyDictionary()


class _Part(NamedTuple):
    """Consecutive weights of a group: the slots `which`, elements `start` to `end` of its flat
    buffer.
    """

    group: ParamGroup
    dtype: torch.dtype
    which: slice
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return (self.end - self.start) * self.dtype.itemsize

    @property
    def is_here(self) -> bool:
        """Whether this rank already has them."""
        return self.group.persistent and self.dtype == self.group.dtype


class Weights:
    """All weights of a model, with tied weights once. All ranks must read them at the same time.

    They are those of the model's `state_dict()`, under its keys. With `by_parameter` they are all
    parameters, under their names, and the other tensors of the `state_dict()`.

    Args:
        dtype: the dtype of floating-point weights, rounded from the fp32 masters if there are any.
            None means the dtype they are trained in.

    Attributes:
        specs: names, shapes and dtypes, in the order of the values.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[ParamGroup],
        comm: Communicator,
        dtype: torch.dtype | None = None,
        exclude_frozen: bool = False,
        by_parameter: bool = False,
    ):
        if hasattr(model, PIPELINE_PLACE):
            raise UsageError(
                "each rank has a part of this model only: use save_checkpoint, and `zero "
                "consolidate` on its folder"
            )
        self.groups = [group for group in groups if group.trainable or not exclude_frozen]
        self.comm = comm
        if not isinstance(dtype, torch.dtype | None):
            raise UsageError(f"the dtype of weights is {dtype!r}: give one such as torch.bfloat16")
        self.dtype = dtype
        self.names: dict[ParamGroup, list[str | None]] = {}
        for group in self.groups:
            is_named = by_parameter and not group.packed
            self.names[group] = [*group.param_names] if is_named else [None] * len(group.params)
        for key, (group, i) in saved_places(model).items():
            if group in self.names and self.names[group][i] is None:
                self.names[group][i] = key
                if group.packed and wraps_tensors(group.params[i]):
                    raise UsageError(
                        f"parameter {key!r} is a {type(group.params[i]).__name__}, which cannot be "
                        "saved from shards: save the trained weights alone, with "
                        "exclude_frozen_parameters=True"
                    )
        plain = plain_tensors(model, exclude_frozen, with_base=True)
        require_values(model, plain)
        self.plain = {name: value.detach() for name, value in plain.items()}
        self.specs = [
            TensorSpec(name, param.shape, param.dtype if group.packed else self._dtype(group.dtype))
            for group in self.groups
            for name, param in zip(self.names[group], group.params, strict=True)
            if name is not None
        ] + [
            TensorSpec(name, value.shape, self._dtype(value.dtype))
            for name, value in self.plain.items()
        ]

    def _dtype(self, own: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and own.is_floating_point else own

    def on_first(
        self, what: str, act: Callable[[Iterator[torch.Tensor]], T], where: str = ""
    ) -> T | None:
        """Return `act(values)` on rank 0, None on others. Each value is a weight in host memory,
        valid until the next one is requested.

        An error of `act`, which may stop at any weight, is raised on every rank. `what` and
        `where` name the action in the message."""
        ranks = self.comm.control(what, where, is_long=True).wait_for_all()
        stream = self.stream()

        def on_rank() -> T | None:
            try:
                return act(value.cpu() for _, value in stream) if ranks.rank == 0 else None
            finally:
                # every rank must take part in every gather, rank 0 even after an error
                for _ in stream:
                    pass

        return ranks.together(on_rank)

    @torch.no_grad()
    def stream(self, max_bytes: int = sys.maxsize) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each (name, weight) on the compute device of every rank. A weight is valid until
        the next one is requested.

        Two buffers take turns: while one is in use, the other is filled. Together they take
        `max_bytes`, or more if a single weight is larger than half of that."""
        parts = [part for group in self.groups for part in self._parts(group, max_bytes // 2)]
        largest = max((part.nbytes for part in parts if not part.is_here), default=0)
        buffers = [
            torch.empty(largest, dtype=torch.uint8, device=self.comm.device) for _ in range(2)
        ]
        gathers = (self._gather(part, buffers[i % 2]) for i, part in enumerate(parts))
        versions = [group.version for group in self.groups]
        following = next(gathers, None)
        try:
            for group, _, which, start, _ in parts:
                assert following is not None
                values, pending = following
                following = next(gathers, None)  # in flight while this one is in use
                pending.wait()
                for i in range(*which.indices(len(group.params))):
                    slot, name = group.layout.slots[i], self.names[group][i]
                    if name is None:
                        continue
                    value = group.as_shown(i, values[slot.offset - start : slot.end - start])
                    cut = cut_of(group.params[i])
                    yield name, value if cut is None else cut.gather(value)
                    self._require_unchanged(versions)
        finally:
            if following is not None:  # the reader has stopped early
                following[1].wait()
        for name, value in self.plain.items():
            yield name, value.to(self._dtype(value.dtype))

    def _require_unchanged(self, versions: Sequence[int]) -> None:
        """Raise UsageError, on all ranks alike, if the weights have changed since."""
        if [group.version for group in self.groups] != versions:
            raise UsageError(
                "the weights have changed while they were being read one by one, so that the rest "
                "would be those of another step: read all of them, and then call step() or change "
                "them"
            )

    def _parts(self, group: ParamGroup, max_bytes: int) -> Iterator[_Part]:
        """Yield consecutive weights of a group, at least one and at most `max_bytes`."""
        dtype, slots = self._dtype(group.dtype), group.layout.slots
        if group.layout.padded * dtype.itemsize <= max_bytes:
            yield _Part(group, dtype, slice(0, len(slots)), 0, group.layout.padded)
            return
        first = 0
        for number, slot in enumerate(slots, 1):
            end = slots[number].end if number < len(slots) else sys.maxsize
            if (end - slots[first].offset) * dtype.itemsize > max_bytes:
                yield _Part(group, dtype, slice(first, number), slots[first].offset, slot.end)
                first = number

    def _gather(self, part: _Part, buffer: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Start to gather weights into `buffer`, unless they are here, and return where they will
        be.
        """
        group, layout = part.group, part.group.layout
        if part.is_here:
            return group.full[part.start : part.end], Pending()
        into = buffer[: part.nbytes].view(part.dtype)
        group.wait_for_update()
        source = group.shard if part.dtype == group.dtype else precise_values(group)
        if into.numel() < layout.padded or layout.replicated:
            return into, group.gather_range(into, part.start, source)
        own = into[slice(*group.shard_range)]
        if source is group.shard:
            group.tier.load(own, source).wait()
        else:
            own.copy_(source)
        return into, group.comm.all_gather(into, own)


def save_16bit_model(
    model: nn.Module,
    weights: Weights,
    folder: str | os.PathLike,
    filename: str,
    max_file_bytes: int,
) -> None:
    """Write `weights` as safetensors to `folder`, and `config.json` if the model has one; every
    rank must call it.

    A model of more than `max_file_bytes` is split into several files with an index. The pickle
    files that DeepSpeed writes under names like `pytorch_model.bin` cannot be streamed, so such a
    name is replaced by `model.safetensors`.

    Raises OSError, on every rank, if the disk has no space for it.
    """
    if not filename.endswith(".safetensors"):
        if weights.comm.job.rank == 0:
            logger.warning(
                "%s: written in the safetensors format, as %s", Path(folder) / filename, MODEL_FILE
            )
        filename = MODEL_FILE
    weights.on_first(
        "saving a model",
        lambda values: write_model(
            Path(folder), weights.specs, values, model_config(model), filename, max_file_bytes
        ),
        f" to {folder}",
    )


def consolidated_state_dict(model: nn.Module, weights: Weights) -> dict[str, Any] | None:
    """Return the model's state dict on rank 0, and None on all other ranks. Tied weights are the
    same tensor under each of their names.

    The tensors are in a temporary file (see `on_disk`), so that a rank only needs memory for two
    gathered groups. Every rank must call it. Raises OSError, on every rank, if the disk has no
    space for it."""
    names = [spec.name for spec in weights.specs]
    nbytes = sum(spec.nbytes for spec in weights.specs)
    found = weights.on_first(
        "gathering the model's weights",
        lambda values: on_disk(zip(names, values, strict=True), nbytes),
    )
    for group in weights.groups:
        copies: _Copies = []
        _copies[group] = group.version, copies
        for name, param in zip(weights.names[group], group.params, strict=True):
            on_meta = functools.partial(torch.empty, param.shape, dtype=group.dtype, device="meta")
            copy = None if found is None or name is None else found[name]
            copies.append(on_meta if copy is None else weakref.ref(copy))
    if found is None:
        return None
    state, first = model.state_dict(keep_vars=True), {}
    same = {key: first.setdefault(id(value), key) for key, value in state.items()}
    return {
        key: found.get(key, found.get(same[key], value))
        for key, value in state.items()
        if key in found or same[key] in found or not isinstance(value, torch.Tensor)
    }


def show_copies_in_state_dicts(model: nn.Module) -> None:
    """Have `state_dict()` of every module of a sharded model give what `consolidated_state_dict`
    has just gathered.

    Some trainers gather the weights, and then call `save_pretrained()` without passing them, on
    rank 0 or on all ranks, of which rank 0 writes. The other ranks get tensors on the device
    "meta": writing them raises an error."""
    for module in model.modules():
        if any(owning_group(param) is not None for param in module.parameters(recurse=False)):
            if _show_copies not in module._state_dict_hooks.values():
                module.register_state_dict_post_hook(_show_copies)


def _show_copies(
    module: nn.Module, state: dict[str, object], prefix: str, metadata: object
) -> None:
    for name, param in module._parameters.items():
        key = prefix + name
        # With keep_vars=True, the caller wants the parameters themselves.
        if not isinstance(param, ShardedParameter) or isinstance(state.get(key), nn.Parameter):
            continue
        group = owning_group(param)
        if group is None or key not in state:
            continue
        version, copies = _copies.get(group, (None, []))
        copy = copies[group.index[param]]() if version == group.version else None
        if copy is not None:
            state[key] = copy


def copied_state_dict(state: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Copy a state dict to host memory, for stages 0 to 2, where every rank has all weights, or its
    parts of them.

    On rank 0, which saves it, the copy is in a temporary file, as at stage 3. Other ranks get the
    values themselves. A tensor that has several names remains one tensor. If tensors are sharded
    over ranks, all ranks must call it."""
    first: dict[object, str] = {}
    same_as = {
        name: first.setdefault(
            (local(value).data_ptr(), value.shape, value.stride()) if value.numel() else name, name
        )
        for name, value in state.items()
    }
    kept: dict[str, Any] = {name: state[name].detach() for name in first.values()}
    joined = (
        (name, value if local(value) is value else value.full_tensor())
        for name, value in kept.items()
    )
    if rank > 0:
        for _ in joined:  # rank 0 needs the parts
            pass
        return {name: value.detach() for name, value in state.items()}
    copies = on_disk(
        ((name, value.cpu()) for name, value in joined), sum(v.nbytes for v in kept.values())
    )
    return {name: copies[same_as[name]] for name in state}


# -- a state dict outside the process's own memory


# Bytes of a mapped model that may count as the process's own.
_RESIDENT = 1 << 29


def _unmap_pages(mapped: weakref.ref[mmap.mmap], stop: threading.Event) -> None:
    """While the mapping is used, and until `stop`, regularly drop its pages from this process. The
    system's cache keeps them.

    The kernel would drop them only when memory is short. Until then, limits on resident memory
    would count them."""
    while not stop.wait(0.02) and (memory := mapped()) is not None:
        memory.madvise(mmap.MADV_DONTNEED)
        del memory


def on_disk(tensors: Iterable[tuple[str, torch.Tensor]], nbytes: int) -> dict[str, torch.Tensor]:
    """Return copies of tensors in a file without a name that is mapped into host memory.

    The kernel reads and drops their pages as needed, so they take none of the process's own memory.
    The disk space is freed when the last of them is gone. The file is created in the folder for
    temporary files (`TMPDIR`), or in the working directory if only that has space for `nbytes`.

    Raises OSError if neither has enough space.
    """
    places = [tempfile.gettempdir(), os.getcwd()]
    place = next((place for place in places if shutil.disk_usage(place).free > nbytes), None)
    if place is None:
        raise OSError(
            f"no room for the {size(nbytes)} of the model in {' or '.join(places)}; set "
            "TMPDIR to a disk"
        )
    entries: list[tuple[str, torch.Size, torch.dtype, int]] = []
    with tempfile.TemporaryFile(dir=place) as file:
        for name, tensor in tensors:
            file.write(b"\0" * (-file.tell() % 64))
            entries.append((name, tensor.shape, tensor.dtype, file.tell()))
            file.write(bytes_of(tensor))
        file.write(b"\0")  # an empty file cannot be mapped
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE)
    if nbytes > _RESIDENT:
        stop = threading.Event()
        act, name = _unmap_pages, "zero mapped file"
        EngineThread(act, weakref.ref(mapped), stop, name=name, end=stop.set).start()
    return {
        name: torch.frombuffer(mapped, dtype=dtype, count=shape.numel(), offset=offset).view(shape)
        if shape.numel()
        else torch.empty(shape, dtype=dtype)
        for name, shape, dtype, offset in entries
    }
