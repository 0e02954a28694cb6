"""The optimizer step on shards: fp32 masters, a tile at a time, by any element-wise torch optimizer.

gradients (sum over ranks, times the loss scale)
  -> global norm, overflow known on every rank alike
  -> per tile: scale once (mean, unscale, clip) -> optimizer.step() on the tile's masters
  -> per unit: round the master into the shard, drop what was gathered from the old one
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zero.comm import Communicator
from zero.errors import UsageError
from zero.gradients import GradientReducer
from zero.optim.attributes import OptimizerAttributes
from zero.optim.loss_scaler import LossScaler
from zero.tiers import Tier
from zero.unit import Unit

logger = logging.getLogger("zero")


@dataclass(frozen=True)
class Tile:
    """A piece of one unit's master that belongs to one param group: what the optimizer sees as a parameter."""

    unit: Unit
    group: int
    start: int
    master: torch.Tensor

    @property
    def end(self) -> int:
        return self.start + self.master.numel()


def param_group_of(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, int]:
    """The index of each parameter's param group."""
    return {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}


class NonFiniteGradientError(RuntimeError):
    """Gradients stayed non-finite at the smallest loss scale."""


class ZeroOptimizer(OptimizerAttributes):
    """Drives `optimizer`, whose param groups named the model's parameters, over this rank's shards of the masters.

    The param groups stay the optimizer's own (learning-rate schedulers act on them); their `params` become tiles,
    1-D fp32 views of the masters. Groups are updated at most `sub_group_size` elements at a time.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        reducer: GradientReducer,
        comm: Communicator,
        tier: Tier,
        *,
        sub_group_size: int,
        clipping: float = 0.0,
        scaler: LossScaler | None = None,
        reduce_op: str = "mean",
    ):
        self.optimizer, self.reducer, self.comm = optimizer, reducer, comm
        self.units = [unit for unit in units if unit.trainable]
        self.sub_group_size, self.clipping, self.scaler = sub_group_size, clipping, scaler
        self._reduce_factor = comm.mean_factor * (comm.world_size if reduce_op == "sum" else 1)
        self.overflow = False
        self.grad_norm: float | None = None
        self.fp16_groups = [list(group["params"]) for group in optimizer.param_groups]
        group_of = param_group_of(optimizer)
        known = {param for unit in units for param in unit.params}
        if strangers := [param for param in group_of if param not in known and param.numel()]:
            raise UsageError(
                f"the optimizer has {len(strangers)} parameter(s) that are not the model's, the first one of shape "
                f"{tuple(strangers[0].shape)}: give them an optimizer of their own"
            )
        self._replicated = any(unit.layout.replicated for unit in self.units)
        for unit in self.units:
            unit.make_master(tier)
            unit.optimizer = self
        self.tiles = [tile for unit in self.units for tile in self._cut(unit, group_of)]
        idle = [
            unit.param_names[i] for unit in self.units for i, param in enumerate(unit.params) if param not in group_of
        ]
        if idle and comm.rank == 0:
            logger.warning("in no param group of the optimizer, and therefore never updated: %s", ", ".join(idle))
        order = {param: number for number, param in enumerate(group_of)}
        self._slots = sorted(
            ((unit, slot) for unit in self.units for slot, param in enumerate(unit.params) if param in group_of),
            key=lambda place: order[place[0].params[place[1]]],
        )
        number_of = {place: number for number, place in enumerate(self._slots)}
        self._pieces = [
            (number_of[unit, piece.slot], unit, piece.start, piece.start + piece.numel)
            for unit in self.units
            for piece in unit.layout.pieces(comm.rank)
            if (unit, piece.slot) in number_of
        ]
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [tile.master for tile in self.tiles if tile.group == index]

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict:
        return self.optimizer.state

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """This rank's part of the masters, tile by tile, each 1-D; DeepSpeed's name for it."""
        return [tile.master for tile in self.tiles]

    @property
    def loss_scale(self) -> float:
        """The present factor on the loss; 1 without fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def cur_scale(self) -> float:
        """As `loss_scale`."""
        return self.loss_scale

    @property
    def gradient_factor(self) -> float:
        """What `unit.grad` must be multiplied by to be the gradient: the mean (or sum) over ranks, unscaled."""
        return self._reduce_factor / self.loss_scale

    def needs_scaler(self) -> bool:
        """Whether the loss must be scaled before `backward()`; see `ZeroEngine.scale`."""
        return self.scaler is not None

    def _cut(self, unit: Unit, group_of: dict) -> Iterator[Tile]:
        """Cut the unit's shard at changes of param group and into at most `sub_group_size` elements.

        A run of slots in one group is one tile, gaps included: gradients are zero there and stay so. Parameters that
        are in no group are in no tile, and stay as they are.
        """
        low, high = unit.layout.shard_range(self.comm.rank)
        starts: list[tuple[int, int | None]] = []
        for param, slot in zip(unit.params, unit.layout.slots, strict=True):
            group = group_of.get(param)
            if not starts or starts[-1][1] != group:
                starts.append((slot.offset, group))
        ends = [start for start, _ in starts[1:]] + [unit.layout.padded]
        for (start, group), end in zip(starts, ends, strict=True):
            first, last = max(start, low), min(end, high)
            for a in range(first, last, self.sub_group_size) if group is not None else ():
                b = min(a + self.sub_group_size, last)
                yield Tile(unit, group, a - low, unit.master[a - low : b - low])

    # -- step

    @torch.no_grad()
    def step(self) -> bool:
        """Apply the accumulated gradients; False if they were not finite and the step was skipped on every rank."""
        self.reducer.drain()
        for unit in self.units:
            self.reducer.settle(unit)
        self.reducer.drain()
        to_mean = self.gradient_factor
        self.grad_norm = self._global_norm() * to_mean
        self.overflow = not math.isfinite(self.grad_norm)
        if self.overflow and self.scaler is not None and self.scaler.exhausted:
            raise NonFiniteGradientError(self._explain_non_finite())
        if self.overflow and self.scaler is None:
            logger.warning(self._explain_non_finite())
        if self.scaler is not None:
            self.scaler.update(self.overflow)
            if self.overflow:
                self.grad_norm = math.inf  # also where inf - inf has made it NaN
        if not self.overflow:
            self._update(to_mean * self._clip_coefficient())
        self.zero_grad()
        return not self.overflow

    def _update(self, factor: float) -> None:
        for batch in self._batches():
            for tile in batch:
                grad = tile.unit.grad[tile.start : tile.end].to(tile.master.dtype)
                tile.master.grad = grad if factor == 1.0 else grad.mul_(factor)
            self._step_only(batch)
            for tile in batch:
                tile.master.grad = None
        for unit in self.units:
            unit.publish_master()

    def _step_only(self, batch: list[Tile]) -> None:
        """One call of the optimizer that sees this batch's tiles alone."""
        everything = [group["params"] for group in self.param_groups]
        try:
            for index, group in enumerate(self.param_groups):
                group["params"] = [tile.master for tile in batch if tile.group == index]
            self.optimizer.step()
        finally:
            for group, params in zip(self.param_groups, everything, strict=True):
                group["params"] = params

    def _batches(self) -> Iterator[list[Tile]]:
        """Tiles in order, at most `sub_group_size` elements together."""
        batch: list[Tile] = []
        numel = 0
        for tile in self.tiles:
            if batch and numel + tile.master.numel() > self.sub_group_size:
                yield batch
                batch, numel = [], 0
            batch.append(tile)
            numel += tile.master.numel()
        if batch:
            yield batch

    def state_dict(self) -> dict:
        """Refused: every rank holds a part of the state; checkpoints put the parts together."""
        raise UsageError("the optimizer's state is sharded: use engine.save_checkpoint and engine.load_checkpoint")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the accumulated gradients."""
        self.reducer.clear()

    # -- norm

    def _global_norm(self) -> float:
        """2-norm of the reduced, still scaled gradient over all ranks, computed as torch does: of parameters' norms."""
        squares = torch.zeros(len(self._slots), dtype=torch.float64, device=self.comm.device)
        norms = [
            torch.linalg.vector_norm(unit.grad[start:end], dtype=torch.float32) for _, unit, start, end in self._pieces
        ]
        if norms:
            index = torch.tensor([number for number, *_ in self._pieces], device=squares.device)
            squares.index_copy_(0, index, torch.stack(norms).to(squares.device, torch.float64) ** 2)
        if not self._replicated:
            self.comm.all_reduce(squares)
        self._param_norms = squares.sqrt_().float()
        return torch.linalg.vector_norm(self._param_norms).item()

    def _clip_coefficient(self) -> float:
        """As `torch.nn.utils.clip_grad_norm_`."""
        return min(1.0, self.clipping / (self.grad_norm + 1e-6)) if self.clipping > 0 else 1.0

    def _explain_non_finite(self) -> str:
        """Names the first parameter, in the model's order, with a non-finite gradient on any rank."""
        unit, slot = self._slots[int(torch.argmin(self._param_norms.isfinite().int()))]
        name = unit.param_names[slot]
        if self.scaler is None:
            return f"the gradient of parameter {name!r} is not finite; this step was skipped on every rank"
        return (
            f"the gradient of parameter {name!r} is not finite at the minimum loss scale {self.loss_scale:g}; "
            "no step was taken. Models pre-trained in bf16, T5 among them, overflow in fp16: use bf16 (--bf16) or "
            "fp32; else look for a learning rate that is too high or for non-finite inputs"
        )
