"""The optimizer step on shards: fp32 masters, a tile at a time, by any element-wise torch optimizer.

gradients (sum over ranks, times the loss scale)
  -> global norm, overflow known on every rank alike
  -> per tile, now or behind the next forward: scale once (mean, unscale, clip) -> update the master -> round it into
     the shard
"""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from zero.agreement import disagree, hyper_parameters, require_same, spread
from zero.comm import Communicator, Pending
from zero.errors import UsageError
from zero.gradients import GradientReducer
from zero.optim import cpu_adam
from zero.optim.loss_scaler import LossScaler
from zero.optim.placement import Placement
from zero.optim.updates import Tile, Updates
from zero.unit import Unit

logger = logging.getLogger("zero")


def param_group_of(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, int]:
    """The index of each parameter's param group."""
    return {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}


def _frozen(group: dict) -> dict:
    """A param group as it is now, without parameters: schedulers change groups, and tensors in them."""
    values = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
    return values | {"params": []}


class NonFiniteGradientError(RuntimeError):
    """Gradients stayed non-finite at the smallest loss scale."""


class ZeroOptimizer:
    """Drives `optimizer`, whose param groups named the model's parameters, over this rank's shards of the masters.

    The param groups stay the optimizer's own (learning-rate schedulers act on them); their `params` become tiles,
    1-D fp32 views of the masters, of at most `sub_group_size` elements. Adam on host memory is `zero.optim.cpu_adam`'s.

    Args: placement: has decided where the units' masters go; checks_overflow: False takes a step with gradients that
    are not finite, too; overlap: what can wait is updated behind the next forward; read_ahead, write_behind: as for
    `Updates`; forward_order: gives the units in the order in which a forward needs them, as far as is known.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        reducer: GradientReducer,
        comm: Communicator,
        placement: Placement,
        *,
        sub_group_size: int,
        clipping: float = 0.0,
        scaler: LossScaler | None = None,
        reduce_op: str = "mean",
        checks_overflow: bool = True,
        overlap: bool = False,
        read_ahead: bool = False,
        write_behind: bool = False,
        forward_order: Callable[[], Sequence[Unit]] = tuple,
    ):
        self.optimizer, self.reducer, self.comm = optimizer, reducer, comm
        self.units = [unit for unit in units if unit.trainable]
        self.sub_group_size, self.clipping, self.scaler = sub_group_size, clipping, scaler
        self._placement, self._overlap, self._forward_order = placement, overlap, forward_order
        self._reduce_factor = comm.mean_factor * (comm.world_size if reduce_op == "sum" else 1)
        self._replicated = any(unit.layout.replicated for unit in self.units)
        self.overflow, self._checks_overflow = False, checks_overflow
        self.grad_norm: float | None = None
        self.read_by_saves = threading.Event()  # not set while a save in the background still copies the state
        self.read_by_saves.set()
        self.model_params = [list(group["params"]) for group in optimizer.param_groups]
        group_of = param_group_of(optimizer)
        self._number_parameters(group_of, {param for unit in units for param in unit.params})
        on_host = any(unit.optimizer_tier.device.type == "cpu" for unit in self.units)
        # torch's own step where nothing is offloaded and the compiled kernel, which gives the same bits, is missing.
        offloaded = placement.here != placement.away
        self._has_kernel = on_host and cpu_adam.serves(optimizer) and (offloaded or cpu_adam.is_compiled())
        self._updates = Updates(self._state_of, read_ahead, write_behind, comm.clock.shows)
        for unit in self.units:
            unit.make_master(unit.optimizer_tier)
            unit.optimizer = self
        self.tiles = [tile for unit in self.units for tile in self._cut(unit, group_of)]
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [tile.master for tile in self.tiles if tile.group == index]

    def _number_parameters(self, group_of: dict[nn.Parameter, int], known: set[nn.Parameter]) -> None:
        """Number what is trained in the order of the param groups, and find this rank's pieces of it."""
        if strangers := [param for param in group_of if param not in known and param.numel()]:
            raise UsageError(
                f"the optimizer has {len(strangers)} parameter(s) that are not the model's, the first one of shape "
                f"{tuple(strangers[0].shape)}: give them an optimizer of their own"
            )
        names = {p: name for unit in self.units for p, name in zip(unit.params, unit.param_names, strict=True)}
        idle = [name for param, name in names.items() if param not in group_of]
        if idle and self.comm.rank == 0:
            logger.warning("in no param group of the optimizer, and therefore never updated: %s", ", ".join(idle))
        self._names = [names[param] for param in group_of if param in names]
        number_of = {param: number for number, param in enumerate(param for param in group_of if param in names)}
        self._pieces = [
            (number_of[unit.params[piece.slot]], unit, piece.start, piece.start + piece.numel)
            for unit in self.units
            for piece in unit.layout.pieces(self.comm.rank)
            if unit.params[piece.slot] in number_of
        ]

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict:
        self.wait()
        return self.optimizer.state

    def _state_of(self, tile: Tile) -> dict:
        return self.optimizer.state.get(tile.master, {})

    @property
    def loss_scale(self) -> float:
        """The present factor on the loss; 1 without fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def gradient_factor(self) -> float:
        """What `unit.grad` must be multiplied by to be the gradient: the mean (or sum) over ranks, unscaled."""
        return self._reduce_factor / self.loss_scale

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
        with self.comm.clock.waiting("optimizer"):
            self.wait()
        self.reducer.drain()
        for unit in self.units:
            self.reducer.collect_left(unit)
            self.reducer.settle(unit)
        self.reducer.drain()
        self._placement.adjust(self.tiles, self.optimizer.state)
        to_mean = self.gradient_factor
        self.grad_norm = self._global_norm() * to_mean
        self.overflow = self._checks_overflow and not math.isfinite(self.grad_norm)
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

    def wait(self, unit: Unit | None = None) -> None:
        """Until the last step's update of `unit`, or of everything, is made; raises what went wrong behind it.

        With everything the state may be changed after it: so it is read first by a save that is still to do so.
        """
        if unit is None:
            self.read_by_saves.wait()
        self._updates.wait(unit)

    def is_late(self, unit: Unit) -> bool:
        """Whether `unit` is still to be updated."""
        return self._updates.is_late(unit)

    def end_updates(self) -> None:
        """Finish what is still to be updated; if that has failed, forget it: other values, or none, will come."""
        try:
            self.wait()
        except Exception as error:
            logger.warning("the last update was not finished: %s", error)
        self._updates.drop()
        for unit in self.units:
            unit.forget_writes()

    def spoil(self, why: str) -> None:
        """From now on whoever needs values gets this error, until `end_updates`."""
        self._updates.fail(RuntimeError(why))

    def _update(self, factor: float) -> None:
        # The settings as they are now: a scheduler may change them while tiles are still to be updated.
        seen = object.__new__(type(self.optimizer))
        seen.__dict__ |= self.optimizer.__dict__
        seen.__dict__.pop("step", None)  # torch's schedulers put a counting one there, and ask whether it was called:
        self.optimizer._opt_called = True
        seen.param_groups = [_frozen(group) for group in self.param_groups]
        # Asked each time: scripts put hooks on their optimizers.
        by_kernel = self._has_kernel and cpu_adam.serves(self.optimizer)
        update = partial(self._update_tile, factor, seen, by_kernel)
        self._updates.run([tile for tile in self.tiles if not self._can_wait(tile.unit)], update)
        for unit in self.units:
            unit.invalidate()
        place = {unit: number for number, unit in enumerate(dict.fromkeys((*self._forward_order(), *self.units)))}
        later = [tile for tile in self.tiles if self._can_wait(tile.unit)]
        self._updates.start(sorted(later, key=lambda tile: place[tile.unit]), update)

    def _can_wait(self, unit: Unit) -> bool:
        """Persistent units are gathered in the step, by all ranks at the same time."""
        return self._overlap and not unit.persistent

    def _update_tile(
        self, factor: float, seen: torch.optim.Optimizer, by_kernel: bool, tile: Tile, grad: torch.Tensor
    ) -> Pending:
        """Update one tile with its gradient, in memory, and start to round it into the shard."""
        if by_kernel and tile.master.device.type == "cpu":
            values = self._adam(factor, seen.param_groups[tile.group], tile, grad)
        else:
            # Under another object than the user's optimizer has: its zero_grad() may come while this runs.
            values, grad = tile.master.detach(), grad.to(tile.master.dtype)
            values.grad = grad if factor == 1.0 else grad.mul_(factor)
            seen.state = defaultdict(dict, {values: self.optimizer.state[tile.master]})
            group = seen.param_groups[tile.group]
            group["params"] = [values]
            before = group.copy()
            seen.step()
            self._refuse_changed(before, group)
            self.optimizer.state[tile.master] = seen.state[values]
            # Nothing shall keep the tile's buffers from being used again.
            group["params"], seen.state = [], {}
        return tile.unit.publish(tile.start, values)

    def _refuse_changed(self, before: dict, group: dict) -> None:
        """Numbers in a param group that a step changes would change once for each tile."""

        def is_same(key: str, value: object) -> bool:
            return value is before.get(key) or (not isinstance(value, torch.Tensor) and value == before.get(key))

        if changed := [key for key, value in group.items() if not is_same(key, value)]:
            raise UsageError(
                f"optimizer {type(self.optimizer).__name__} changes {changed[0]!r} of its param group in step(), as "
                "schedule-free ones do; that is not supported: take one that keeps what changes in its state"
            )

    def _adam(self, factor: float, group: dict, tile: Tile, grad: torch.Tensor) -> torch.Tensor:
        """One pass over memory; returns the new values in the shard's dtype."""
        state = self.optimizer.state[tile.master]
        if not state:
            state |= cpu_adam.new_state(tile.master)
        state["step"] += 1
        shard, rounded = tile.unit.shard[tile.start : tile.end], None
        if shard.dtype != torch.float32:
            in_memory = shard.device.type == "cpu" and not tile.unit.tier.holds_in_file(shard)
            rounded = shard if in_memory else torch.empty_like(shard, device="cpu")
        beta1, beta2 = group["betas"]
        numbers = {name: group[name] for name in ("lr", "eps", "weight_decay")} | {"beta1": beta1, "beta2": beta2}
        cpu_adam.adam(
            *(tile.master, grad, state["exp_avg"], state["exp_avg_sq"], rounded),
            step=int(state["step"]),
            decoupled=group["decoupled_weight_decay"],
            factor=factor,
            # Where the model computes on the CPU its updates have torch's bits, offloaded or not.
            torch_sqrt=self.comm.device.type == "cpu",
            **numbers,
        )
        return tile.master if rounded is None else rounded

    def state_dict(self) -> dict:
        """This rank's part of the state, as torch gives it; `engine.save_checkpoint` puts the parts together."""
        self.wait()
        return self.optimizer.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the accumulated gradients."""
        self.reducer.clear()

    # -- norm

    def _global_norm(self) -> float:
        """2-norm of the reduced, still scaled gradient over all ranks, computed as torch does: of parameters' norms."""
        squares = torch.zeros(len(self._names), dtype=torch.float64, device=self.comm.device)
        # Beside the norms, in the same reduction: whether all ranks are about to take the same step.
        # Not how many tiles: of a unit with few elements a rank may have none.
        facts = {key: each for key, each in hyper_parameters(self.param_groups).items() if not key.endswith(", params")}
        facts["backwards since the last step"] = self.reducer.backwards
        own = torch.tensor(spread(list(facts.values())), dtype=torch.float64, device=squares.device)
        norms = [self._norm(unit, start, end).to(squares.device) for _, unit, start, end in self._pieces]
        if norms:
            index = torch.tensor([number for number, *_ in self._pieces], device=squares.device)
            squares.index_copy_(0, index, torch.stack(norms).to(torch.float64) ** 2)
        if self._replicated:
            sums = self.comm.all_reduce(own)
        else:
            squares, sums = self.comm.all_reduce(torch.cat([squares, own])).split([len(squares), len(own)])
        if disagree(sums.tolist(), self.comm.world_size):
            require_same(self.comm, facts)
        self._param_norms = squares.sqrt_().float()
        return torch.linalg.vector_norm(self._param_norms).item()

    def _norm(self, unit: Unit, start: int, end: int) -> torch.Tensor:
        known = self.reducer.norms.get((unit, start))
        return torch.linalg.vector_norm(unit.grad[start:end], dtype=torch.float32) if known is None else known

    def _clip_coefficient(self) -> float:
        """As `torch.nn.utils.clip_grad_norm_`."""
        return min(1.0, self.clipping / (self.grad_norm + 1e-6)) if self.clipping > 0 else 1.0

    def _explain_non_finite(self) -> str:
        """Names the first parameter, in the model's order, with a non-finite gradient on any rank."""
        name = self._names[int(torch.argmin(self._param_norms.isfinite().int()))]
        if self.scaler is None:
            return f"the gradient of parameter {name!r} is not finite; this step was skipped on every rank"
        return (
            f"the gradient of parameter {name!r} is not finite at the minimum loss scale {self.loss_scale:g}; "
            "no step was taken. Models pre-trained in bf16, T5 among them, overflow in fp16: use bf16 (--bf16) or "
            "fp32; else look for a learning rate that is too high or for non-finite inputs"
        )
