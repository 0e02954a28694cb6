"""Reading and writing a sharded parameter's fp32 value, gradient and optimizer state, by DeepSpeed's `safe_*` names.

*full*  the whole parameter, in its shape; every rank must call, and gets (or gives) the same.
*local* this rank's part, 1-D and possibly empty, in the layout of `param.ds_tensor`; no communication.

All of them return None for a parameter that no engine's optimizer trains; gradients are also None before the first
backward of a step and after it. Gradients are those that the optimizer will see, before clipping: the mean over ranks
without the loss scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from zero.errors import UsageError
from zero.layout import Piece
from zero.optim.step import optimizer_of
from zero.optimizer_shard import OptimizerShard
from zero.unit import Unit, unit_of

_FP32, _GRADIENT = "fp32 value", "gradient"


class _Fragment:
    """This rank's pieces of one parameter, of one kind of tensor: masters, gradients or an optimizer state."""

    def __init__(self, param: nn.Parameter, kind: str):
        unit = unit_of(param)
        self.param, self.kind, self.unit = param, kind, unit
        self.optimizer = None if unit is None else optimizer_of(unit)
        if unit is not None:
            unit.wait_for_update()
        self.exists = self.optimizer is not None and self._has_values(unit)
        if self.exists:
            slot = next(i for i, held in enumerate(unit.params) if held is param)
            # A rank without a part of the parameter has an empty one, for it takes part in what is collective.
            self.piece = unit.layout.part(slot, unit.comm.rank)

    def _has_values(self, unit: Unit) -> bool:
        if self.kind == _GRADIENT:
            reducer = self.optimizer.reducer
            return reducer.is_fresh(unit) or reducer.carried(unit) is not None
        return self.kind == _FP32 or any(self.kind in state for state in self.optimizer.state.values())

    @property
    def _shard(self) -> OptimizerShard:
        return self.optimizer.shards[self.unit]

    @property
    def _factor(self) -> float:
        """What a stored gradient must be multiplied by to be the mean gradient."""
        return self.optimizer.gradient_factor if self.kind == _GRADIENT else 1.0

    def _reduced(self) -> torch.Tensor:
        """The unit's gradient; a copy, reduced for the moment, of one that still waits for its last micro-batch."""
        unit = self.unit
        waiting = self.optimizer.reducer.carried(unit)
        if waiting is None:
            return self._shard.grad
        out = torch.empty(unit.layout.shard_numel, device=waiting.device)
        exchange = unit.comm.reduce if unit.layout.replicated else unit.comm.reduce_scatter
        exchange(out, waiting.clone(), accumulate=False, max_numel=waiting.numel()).wait()
        return out

    def _places(self, piece: Piece) -> Iterator[tuple[int, torch.Tensor]]:
        """(position in the piece, stored tensor) in order; the optimizer keeps its state by tiles."""
        start, end = piece.start, piece.start + piece.numel
        if self.kind in (_FP32, _GRADIENT):
            yield 0, (self._shard.master if self.kind == _FP32 else self._reduced())[start:end]
            return
        yield 0, self.unit.shard.new_empty(0, dtype=torch.float32)
        for tile in self.optimizer.tiles:
            first, last = max(start, tile.start), min(end, tile.end)
            if tile.unit is self.unit and first < last:
                state = self.optimizer.state[tile.master][self.kind]
                yield first - start, state[first - tile.start : last - tile.start]

    @torch.no_grad()
    def read_local(self) -> torch.Tensor | None:
        if not self.exists:
            return None
        device = self.unit.comm.device
        parts = [part for _, part in self._places(self.piece)]
        return torch.cat(parts).to(device, torch.float32).mul_(self._factor)

    @torch.no_grad()
    def read_full(self) -> torch.Tensor | None:
        if not self.exists:
            return None
        comm, full = self.unit.comm, torch.zeros(self.param.ds_numel, device=self.unit.comm.device)
        part = full[self.piece.inside : self.piece.inside + self.piece.numel]
        part.copy_(self.read_local()[: part.numel()])
        if not self.unit.layout.replicated:
            comm.all_reduce(full)
        return full.view(self.param.ds_shape)

    @torch.no_grad()
    def write_local(self, value: torch.Tensor) -> None:
        """Store this rank's part; `finish` must follow on every rank."""
        if self.kind == _GRADIENT and self.optimizer.reducer.carried(self.unit) is not None:
            raise UsageError("gradients can be set after the last micro-batch of a step only, at stages 0 and 1")
        if value.numel() != self.piece.numel:
            raise ValueError(f"expected {self.piece.numel} elements for this rank's part, got {value.numel()}")
        if self.kind == _GRADIENT:
            self._shard.forget_norm(self.piece.start)
        for start, place in self._places(self.piece):
            place.copy_(value.reshape(-1)[start : start + place.numel()].float() / self._factor)

    def finish(self) -> None:
        """After masters were written: give the parameters the new values."""
        if self.kind == _FP32:
            self._shard.master_was_replaced()

    def write_full(self, value: torch.Tensor) -> None:
        if not self.exists:
            return
        if value.shape != self.param.ds_shape:
            raise ValueError(f"{self.kind}: expected shape {tuple(self.param.ds_shape)}, got {tuple(value.shape)}")
        part = value.reshape(-1)[self.piece.inside : self.piece.inside + self.piece.numel]
        self.write_local(nn.functional.pad(part, (0, self.piece.numel - part.numel())))
        self.finish()


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The parameter's fp32 master, as a copy in the parameter's shape. Every rank must call."""
    return _Fragment(param, _FP32).read_full()


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The accumulated mean gradient, fp32, as a copy in the parameter's shape. Every rank must call."""
    return _Fragment(param, _GRADIENT).read_full()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """The state torch's optimizer keeps under `optim_state_key` ("exp_avg", ...). Every rank must call."""
    return _Fragment(param, optim_state_key).read_full()


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the parameter's master, and with it the parameter. Every rank must call, with the same `value`."""
    _Fragment(param, _FP32).write_full(value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the accumulated mean gradient. Every rank must call, with the same `value`."""
    _Fragment(param, _GRADIENT).write_full(value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace an element-wise optimizer state. Every rank must call, with the same `value`."""
    _Fragment(param, optim_state_key).write_full(value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace each accumulated gradient by `update_func(gradient, param)`. Every rank must call, alike."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the master, as a copy."""
    return _Fragment(param, _FP32).read_local()


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the accumulated mean gradient, as an fp32 copy."""
    return _Fragment(param, _GRADIENT).read_local()


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of an optimizer state, as a copy."""
    return _Fragment(param, optim_state_key).read_local()


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the master. The parameter follows, so that every rank must call."""
    fragment = _Fragment(param, _FP32)
    if fragment.exists:
        fragment.write_local(value)
        fragment.finish()


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the accumulated mean gradient."""
    fragment = _Fragment(param, _GRADIENT)
    if fragment.exists:
        fragment.write_local(value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's part of an element-wise optimizer state."""
    fragment = _Fragment(param, optim_state_key)
    if fragment.exists:
        fragment.write_local(value)
