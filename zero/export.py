"""The whole model's weights out of the shards, gathered unit by unit: into a model folder, or as a state dict."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from zero.checkpoint.model import DTYPES, MODEL_FILE, TensorSpec, model_config, on_disk, write_model
from zero.checkpoint.ranks import Ranks
from zero.checkpoint.state import plain_tensors, tied_names, values_of
from zero.comm import Communicator, Pending
from zero.unit import State, Unit, unit_of

logger = logging.getLogger("zero")

T = TypeVar("T")


class Weights:
    """All weights of a model, tied ones once, to be passed over once; every rank must do so at the same time.

    Args:
        dtype: of floating-point weights, rounded from the fp32 masters where there are any: a torch dtype, or "fp16",
        "bf16" or "fp32"; None: the dtype they are trained in.

    Attributes:
        specs: names, shapes and dtypes, in the order in which the values come.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        comm: Communicator,
        dtype: torch.dtype | str | None = None,
        exclude_frozen: bool = False,
    ):
        self.units = [unit for unit in units if unit.trainable or not exclude_frozen]
        if isinstance(dtype, str) and dtype not in DTYPES:
            raise ValueError(f"save_dtype is {dtype!r}; give one of {', '.join(DTYPES)}, a torch dtype or None")
        self.comm, self.dtype = comm, DTYPES.get(dtype, dtype)
        self.plain = {
            name: value.detach()
            for name, value in plain_tensors(model).items()
            if not (exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad)
        }
        self.specs = [
            TensorSpec(name, slot.shape, self._dtype(unit.dtype))
            for unit in self.units
            for name, slot in zip(unit.param_names, unit.layout.slots, strict=True)
        ] + [TensorSpec(name, value.shape, self._dtype(value.dtype)) for name, value in self.plain.items()]

    def _dtype(self, own: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and own.is_floating_point else own

    def on_first(self, what: str, act: Callable[[Iterator[torch.Tensor]], T]) -> T | None:
        """`act(values)` on rank 0, None on others: each weight in host memory, valid until the next one is asked for.

        Raises an error of `act`, which may stop anywhere, on every rank alike; `what` is being done, for its message.
        """
        ranks, values = Ranks.of(self.comm, what), self._values()

        def run() -> T | None:
            try:
                return act(values) if ranks.rank == 0 else None
            finally:
                for _ in values:  # the other ranks' part, and rank 0's after an error: the gathers are made by all
                    pass

        return ranks.together(run)

    @torch.no_grad()
    def _values(self) -> Iterator[torch.Tensor]:
        """While one unit is handed out, on rank 0 alone, the next one is on its way: a rank holds two at most."""
        largest = max((unit.layout.padded * self._dtype(unit.dtype).itemsize for unit in self.units), default=0)
        buffers = [torch.empty(largest, dtype=torch.uint8, device=self.comm.device) for _ in range(2)]
        arriving: tuple[torch.Tensor, Pending] | None = None
        for number, unit in enumerate([*self.units, None]):
            arrived, arriving = arriving, None if unit is None else self._gather(unit, buffers[number % 2])
            if arrived is None:
                continue
            full, pending = arrived
            pending.wait()
            if self.comm.rank == 0:
                for slot in self.units[number - 1].layout.slots:
                    yield full[slot.offset : slot.end].view(slot.shape).cpu()
        if self.comm.rank == 0:
            for value in self.plain.values():
                yield value.to("cpu", self._dtype(value.dtype))

    def _gather(self, unit: Unit, buffer: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Start to gather a unit's values into `buffer`, unless they are here; returns where they will be."""
        dtype = self._dtype(unit.dtype)
        if unit.persistent and dtype == unit.dtype:
            return unit.full, Pending()
        full = buffer[: unit.layout.padded * dtype.itemsize].view(dtype)
        own = full[slice(*unit.layout.shard_range(self.comm.rank))]
        unit.wait_for_update()
        if dtype == unit.dtype:
            unit.tier.load(own, unit.shard).wait()
        else:
            own.copy_(values_of(unit))
        return full, self.comm.all_gather(full, own) if own.numel() < full.numel() else Pending()


def save_16bit_model(
    model: nn.Module, weights: Weights, folder: str | os.PathLike, filename: str, max_file_bytes: int
) -> None:
    """Write `weights` as safetensors to `folder`, and `config.json` if the model has one; every rank must call it.

    A model of more than `max_file_bytes` is cut into several files with an index. The pickle files that DeepSpeed
    writes under names like `pytorch_model.bin` cannot be streamed: another name becomes `model.safetensors`.

    Raises OSError, on every rank alike, where the disk cannot take it.
    """
    if not filename.endswith(".safetensors"):
        if weights.comm.rank == 0:
            logger.warning("%s: written in the safetensors format, as %s", Path(folder) / filename, MODEL_FILE)
        filename = MODEL_FILE
    weights.on_first(
        f"saving a model to {folder}",
        lambda values: write_model(Path(folder), weights.specs, values, model_config(model), filename, max_file_bytes),
    )


def consolidated_state_dict(model: nn.Module, weights: Weights) -> dict[str, torch.Tensor] | None:
    """The model's state dict on rank 0, and None on all other ranks; tied weights are one tensor under each name.

    The tensors lie in a temporary file, see `zero.checkpoint.model.on_disk`: besides two gathered units a rank needs no
    memory. Every rank must call it. Raises OSError, on every rank alike, where the disk cannot take it.
    """
    names, nbytes = [spec.name for spec in weights.specs], sum(spec.nbytes for spec in weights.specs)
    found = weights.on_first(
        "gathering the model's weights", lambda values: on_disk(zip(names, values, strict=True), nbytes)
    )
    for unit in weights.units:
        for param, name, slot in zip(unit.params, unit.param_names, unit.layout.slots, strict=True):
            if found is None:
                unit.copies[param] = functools.partial(torch.empty, slot.shape, dtype=unit.dtype, device="meta")
            else:
                unit.copies[param] = weakref.ref(found[name])
    if found is None:
        return None
    found |= {name: found[first] for name, first in tied_names(model).items() if first in found}
    return {
        name: found.get(name, value)
        for name, value in model.state_dict(keep_vars=True).items()
        if name in found or not isinstance(value, torch.Tensor)
    }


def show_copies_in_state_dicts(model: nn.Module) -> None:
    """Have `state_dict()` of every module of a sharded model give what `consolidated_state_dict` has just gathered.

    Some trainers have the weights gathered, and then call `save_pretrained()` without them, be it on rank 0 or on all
    ranks, of which rank 0 writes. The others get tensors on the device "meta": who would write them gets an error.
    """
    for module in model.modules():
        if any(unit_of(param) is not None for param in module.parameters(recurse=False)):
            if _show_copies not in module._state_dict_hooks.values():
                module.register_state_dict_post_hook(_show_copies)


def _show_copies(module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
    for name, param in module._parameters.items():
        unit, key = unit_of(param), prefix + name
        # With keep_vars=True the parameters themselves were asked for.
        if unit is None or unit.state is State.EXPOSED or key not in state or isinstance(state[key], nn.Parameter):
            continue
        copy = unit.copies[param]() if param in unit.copies else None
        if copy is not None:
            state[key] = copy
        else:
            _warn_of_placeholders()


@functools.cache  # once
def _warn_of_placeholders() -> None:
    logger.warning(
        "state_dict() of a model that is sharded over ranks has NaN for its weights: to save it use the trainer's "
        "save_model() or engine.save_16bit_model(), to look at it zero.GatheredParameters(model.parameters())"
    )


def copied_state_dict(state: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """A copy of a state dict in host memory, for stages 0 to 2, where every rank has all weights.

    On rank 0, which saves it, it lies in a temporary file as that of stage 3 does; other ranks get the values
    themselves. What was one tensor under several names stays one.
    """
    if rank > 0:
        return {name: value.detach() for name, value in state.items()}
    first: dict[object, str] = {}
    same_as = {
        name: first.setdefault((value.data_ptr(), value.shape, value.stride()) if value.numel() else name, name)
        for name, value in state.items()
    }
    kept = {name: state[name].detach() for name in first.values()}
    copies = on_disk(((name, value.cpu()) for name, value in kept.items()), sum(v.nbytes for v in kept.values()))
    return {name: copies[same_as[name]] for name in state}
