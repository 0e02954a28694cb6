"""Reads and writes the fp32 value, the gradient and the optimizer state of a sharded parameter,
with the functions that DeepSpeed calls `safe_*`.

    safe_get_full_fp32_param(param)              safe_set_full_fp32_param(param, value)
    safe_get_full_grad(param)                    safe_set_full_grad(param, value)
    safe_get_full_optimizer_state(param, key)    safe_set_full_optimizer_state(param, value, key)

A *full* function reads or writes the whole parameter, in its shape. Every rank must call it; all
get the same value, and all must give the same one. The functions with *local* in place of *full*
read or write this rank's part only: a 1-D tensor, possibly empty, in the layout of
`param.ds_tensor`. They send nothing, with one exception: every rank must call
`safe_set_local_fp32_param`, because the parameter itself changes with its fp32 value.

The functions that read return an fp32 copy, or None for a parameter that is not trained by any
engine's optimizer. A gradient is also None before the first backward pass of a step and after the
step. It is the mean over the ranks, before clipping and without the loss scale. The key of an
optimizer state is torch's name for it, such as "exp_avg"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import nn

from zero.core.layout import Piece
from zero.core.param_group import owning_group
from zero.core.reduction import GroupGradients
from zero.core.sharded_param import cut_of, local
from zero.errors import UsageError
from zero.optim.adam8bit import KEYS, decode_range, decoded, encoded, is_coded
from zero.optim.redistribute import WholeTensor
from zero.optim.sharded_optimizer import optimizer_of

FP32, GRADIENT = "fp32 value", "gradient"


class ParameterState:
    """This rank's pieces of one parameter, of one kind of tensor: masters, gradients or an
    optimizer state, as they are stored. The functions below are built from its four methods.
    """

    def __init__(self, param: nn.Parameter, kind: str):
        self.param = param
        self.kind = kind
        self._is_state = kind not in (FP32, GRADIENT)
        self._whole: WholeTensor | None = None
        # The state of the whole tensor, if this rank owns it, and if it has the tensor's shape.
        self._owned: torch.Tensor | None = None
        self.exists = False
        group = owning_group(param)
        if group is not None:
            group.wait_for_update()
        optimizer = None if group is None else optimizer_of(group)
        self.is_trained = optimizer is not None
        if group is None or optimizer is None:
            return
        self.group = group
        self.optimizer = optimizer
        self._shard = optimizer.shards[group]
        # What a stored gradient must be multiplied by to be the mean gradient.
        self._factor = optimizer.gradient_factor if kind == GRADIENT else 1.0
        whole = optimizer.whole if self._is_state else None
        if whole is not None and param in whole.of_param:
            self._whole = whole.of_param[param]
            found = self._whole.state.get(kind)
            if isinstance(found, torch.Tensor) and found.shape == param.shape:
                self._owned = found
        self.exists = self._has_values()
        if self.exists:
            slot, layout, (low, _) = group.index[param], group.layout, group.shard_range
            # A rank without a part of the parameter has an empty piece, because it must take part
            # in collectives. The piece of a group's only parameter has all of the shard's padding.
            self.piece = next(
                (each for each in group.pieces if each.slot == slot), Piece(slot, 0, 0, 0)
            )
            if len(layout.slots) == 1:
                self.piece = Piece(0, 0, min(low, layout.numel), layout.shard_numel)

    @property
    def _gradients(self) -> GroupGradients:
        return self.optimizer.reducer.gradients[self.group]

    def _has_values(self) -> bool:
        if self.kind == GRADIENT:
            return self._gradients.is_fresh or self._gradients.carried is not None
        if self._whole is not None:
            return self._owned is not None
        return self.kind == FP32 or any(
            self.kind in state for state in self.optimizer.state.values()
        )

    def _refuse_local(self) -> None:
        if self._whole is not None:
            raise UsageError(
                f"optimizer state {self.kind!r} of {self._whole.name} is not sharded: it is "
                "whole on the rank that owns the parameter; use the function for the full state"
            )

    def _refuse_unknown(self) -> None:
        """Raise UsageError if the optimizer has states, and none of this name."""
        if not self.is_trained or self._whole is not None or not self._is_state:
            return
        known = sorted({key for state in self.optimizer.state.values() for key in state})
        if known:
            raise UsageError(f"the optimizer has no state {self.kind!r}; it has {', '.join(known)}")

    def _reduced(self) -> torch.Tensor:
        """The group's reduced gradient.

        If it still waits for its last micro-batch: a copy that is reduced now.
        """
        group = self.group
        waiting = self._gradients.carried
        reduced = self._shard.grad
        if waiting is None:
            assert reduced is not None, "this rank has a gradient if `exists`"
            return reduced
        out = torch.empty(group.layout.shard_numel, dtype=torch.float32, device=waiting.device)
        exchange = group.comm.reduce if group.layout.replicated else group.comm.reduce_scatter
        exchange(out, waiting.clone(), accumulate=False).wait()
        if self._gradients.is_fresh and reduced is not None:
            # Micro-batches of `coalesce_grad_reduction` are reduced already.
            out.add_(reduced.to(out.device))
        return out

    def _places(self, writes: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
        """(position in the piece, stored tensor) in order; state is kept by sub-groups.

        Values of coded moments are a copy, which is stored before the next one comes if the caller
        `writes`."""
        start, end = self.piece.start, self.piece.start + self.piece.numel
        if self.kind in (FP32, GRADIENT):
            yield 0, (self._shard.master if self.kind == FP32 else self._reduced())[start:end]
            return
        yield 0, self.group.shard.new_empty(0, dtype=torch.float32)
        for sub_group in self.optimizer.sub_groups:
            first, last = max(start, sub_group.start), min(end, sub_group.end)
            state, numel = self.optimizer.state.get(sub_group.master, {}), sub_group.master.numel()
            if sub_group.group is self.group and first < last and self.kind in state:
                kept, where = state[self.kind], (first - sub_group.start, last - sub_group.start)
                if self.kind not in KEYS or not is_coded(kept, numel):
                    yield first - start, kept[slice(*where)]
                    continue
                yield first - start, (values := decode_range(self.kind, kept, numel, *where))
                if writes:
                    whole = decoded(state, numel)
                    whole[self.kind][slice(*where)] = values
                    encoded(whole, into=state)  # the rest of the blocks is rounded

    @torch.no_grad()
    def read_local(self) -> torch.Tensor | None:
        """An fp32 copy of this rank's part, 1-D and possibly empty, or None if nothing exists."""
        self._refuse_local()
        if not self.exists:
            return None
        device = self.group.comm.device
        values = torch.cat([part for _, part in self._places()])
        if values.numel() != self.piece.numel:
            return None
        return values.to(device, torch.float32).mul_(self._factor)

    @torch.no_grad()
    def read_full(self) -> torch.Tensor | None:
        """An fp32 copy of all of it, in the parameter's shape, or None if nothing exists.

        Every rank must call it.
        """
        if not self.is_trained or not (self._is_state or self.exists):
            return None
        comm, numel = self.group.comm, local(self.param).numel()
        # The last element says whether a rank has a part. A rank of padding alone does not know
        # which states there are, and the state of a whole tensor has its owner alone.
        full = torch.zeros(numel + 1, dtype=torch.float32, device=comm.device)
        if self._owned is not None:
            values, inside = self._owned.reshape(-1), 0
        elif self._whole is None and self.exists:
            values, inside = self.read_local(), self.piece.inside
        else:
            values, inside = None, 0
        if values is not None and values.numel():
            part = full[inside : min(numel, inside + values.numel())]  # without padding
            part.copy_(values[: part.numel()])
            full[numel] = 1
        if not self.group.layout.replicated:
            comm.all_reduce(full, of_shards=True)
        if self._is_state and not full[numel]:
            return None
        full, cut = full[:numel].view(local(self.param).shape), cut_of(self.param)
        return full if cut is None else cut.gather(full)

    @torch.no_grad()
    def write_local(self, value: torch.Tensor) -> None:
        """Store this rank's part.

        The parameter itself changes with its fp32 value, so every rank must call this to write
        that.
        """
        self._refuse_local()
        if not self.exists:
            return self._refuse_unknown()
        if self.kind == GRADIENT and self._gradients.carried is not None:
            raise UsageError(
                "at stages 0 and 1, gradients can be set only after the last micro-batch of a step"
            )
        if value.numel() != self.piece.numel:
            raise UsageError(
                f"expected {self.piece.numel} elements for this rank's part, got {value.numel()}"
            )
        if self.kind == GRADIENT:
            self._shard.norms.pop(self.piece.start, None)
            self._shard.widen_gradient(self.optimizer.reducer.sum_dtype)
        left = self.piece.numel
        for start, place in self._places(writes=True):
            place.copy_(value.reshape(-1)[start : start + place.numel()].float() / self._factor)
            left -= place.numel()
        if left:
            name = self.group.param_names[self.group.index[self.param]]
            raise UsageError(
                f"{name!r} has no optimizer state {self.kind!r} yet: it has got no gradient so far"
            )
        if self.kind == GRADIENT:
            self._gradients.received.add(self.group.index[self.param])
        if self.kind == FP32:
            self._shard.master_was_replaced()

    @torch.no_grad()
    def write_full(self, value: torch.Tensor) -> None:
        """Store all of it, given in the parameter's shape.

        Every rank must call, with the same `value`.
        """
        if not self.exists:
            return self._refuse_unknown()
        if value.shape != self.param.shape:
            raise UsageError(
                f"{self.kind}: expected shape {tuple(self.param.shape)}, got {tuple(value.shape)}"
            )
        if self._owned is not None:
            self._owned.copy_(value)
            return
        cut = cut_of(self.param)
        part = (value if cut is None else cut.of(value)).reshape(-1)[
            self.piece.inside : self.piece.inside + self.piece.numel
        ]
        self.write_local(nn.functional.pad(part, (0, self.piece.numel - part.numel())))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """The whole parameter's state named `optim_state_key`, or None. Every rank must call it."""
    return ParameterState(param, optim_state_key).read_full()


def safe_get_local_optimizer_state(
    param: nn.Parameter, optim_state_key: str
) -> torch.Tensor | None:
    """This rank's part of the state named `optim_state_key`, or None."""
    return ParameterState(param, optim_state_key).read_local()


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Write the whole parameter's state named `optim_state_key`. Every rank must call it."""
    ParameterState(param, optim_state_key).write_full(value)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Write this rank's part of the state named `optim_state_key`."""
    ParameterState(param, optim_state_key).write_local(value)


safe_get_full_fp32_param = partial(safe_get_full_optimizer_state, optim_state_key=FP32)
safe_get_local_fp32_param = partial(safe_get_local_optimizer_state, optim_state_key=FP32)
safe_set_full_fp32_param = partial(safe_set_full_optimizer_state, optim_state_key=FP32)
safe_set_local_fp32_param = partial(safe_set_local_optimizer_state, optim_state_key=FP32)
safe_get_full_grad = partial(safe_get_full_optimizer_state, optim_state_key=GRADIENT)
safe_get_local_grad = partial(safe_get_local_optimizer_state, optim_state_key=GRADIENT)
safe_set_full_grad = partial(safe_set_full_optimizer_state, optim_state_key=GRADIENT)
safe_set_local_grad = partial(safe_set_local_optimizer_state, optim_state_key=GRADIENT)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter],
    update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor],
) -> None:
    """Replace each accumulated gradient by `update_func(gradient, param)`.

    Every rank must call it, with the same parameters.
    """
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))
