"""The program of one training step: what the engine computes, gathers, waits for and reduces, and in which order.

`rehearse` runs the engine's own hooks and policies (`zero.hooks`, `zero.gathering`, `zero.reduction`) over a model, on
units that move nothing and write down what is asked of them. The model may be one on the meta device, of any size.
`tests/accelerator/test_timeline.py` compares such programs with what the engine does on the simulated accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zero.config import Config
from zero.construction import make_schedule
from zero.estimate.activation_trace import enable_checkpointing, operations
from zero.estimate.states import Home, homes
from zero.estimate.step import NO_COMMUNICATOR, CountedUnit
from zero.gathering import Gathering
from zero.hooks import ModuleHooks
from zero.layout import UnitLayout, UnitPlan, plan_units
from zero.reduction import ReductionOrder
from zero.schedule import Residency
from zero.unit import State


class Op(NamedTuple):
    """`kind`: "compute" (`cost`: operations or seconds), "gather", "use", "reduce", "backward ends" or "step"."""

    kind: str
    unit: int = -1
    cost: float = 0.0


class Operations(TorchDispatchMode):
    """Counts floating-point operations, by torch's formulas, in `total`. (torch's own counter takes twice as long.)"""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True  # a question about a mask's values
        out = func(*args, **(kwargs or {}))
        self.total += operations(func, args, kwargs or {}, out)
        return out


class Program:
    """Collects operations. `clock` gives the operations or seconds that were computed so far."""

    def __init__(self, clock: Callable[[], float]):
        self.clock, self.ops, self._before = clock, [], clock()

    def add(self, kind: str, unit: int = -1) -> None:
        now = self.clock()
        if now > self._before:
            self.ops.append(Op("compute", -1, now - self._before))
        self.ops.append(Op(kind, unit))
        self._before = self.clock()


class RehearsedUnit(CountedUnit):
    """As much of a unit as the hooks and policies see. It moves nothing, and writes down what is asked for."""

    def __init__(self, number: int, plan: UnitPlan, layout: UnitLayout, config: Config, residency: Residency):
        persistent = plan.persistent or config.zero_optimization.stage < 3
        super().__init__(layout, persistent, residency)
        self.number, self.modules, self.params, self.param_names = number, plan.modules, plan.params, plan.param_names
        self.shared, self.trainable, self.full = plan.shared, plan.params[0].requires_grad, torch.empty(1)
        self.program: Program | None = None
        self.home: Home | None = None

    def watch_reads(self, hook: object) -> None:
        """Do nothing: a parameter that is read outside of its modules counts as gathered."""

    def all_gather(self, by: object) -> None:
        super().all_gather(by)
        self.program.add("gather", self.number)

    def unshard(self) -> None:
        self._wait()
        super().unshard()

    def reshard(self) -> None:
        self._wait()
        super().reshard()

    def _wait(self) -> None:
        if self.state is State.GATHERING:
            self.program.add("use", self.number)


class RehearsedReducer:
    """As much of a `GradientReducer` as the order of reductions sees."""

    def __init__(self, program: Program, reduces_now: Callable[[], bool]):
        self._program, self._reduces_now = program, reduces_now
        self._collected: set[RehearsedUnit] = set()

    def collect(self, unit: RehearsedUnit, index: int) -> None:
        unit.params[index].grad = None
        self._collected.add(unit)

    def has_pending(self, unit: RehearsedUnit) -> bool:
        return unit in self._collected

    def reduce(self, unit: RehearsedUnit) -> None:
        self._collected.discard(unit)
        if self._reduces_now():
            self._program.add("reduce", unit.number)

    def end_backward(self) -> None:
        self._program.add("backward ends")


def rehearse(
    model: nn.Module,
    units: Sequence[RehearsedUnit],
    config: Config,
    loss: Callable[[], torch.Tensor],
    clock: Callable[[], float],
    on_accelerator: bool,
) -> list[Op]:
    """The program of the second step, after which nothing changes any more. `loss` runs the model's forward."""
    program, residency, stage = Program(clock), units[0].residency, config.zero_optimization.stage
    micro_batches, at = config.gradient_accumulation_steps or 1, SimpleNamespace(micro=0)
    comm = SimpleNamespace(
        **vars(NO_COMMUNICATOR), matches_by_order=on_accelerator, device="cpu", broadcast=lambda tensor, src: None
    )

    def is_last() -> bool:
        return at.micro == micro_batches - 1

    reducer = RehearsedReducer(program, lambda: stage >= 2 or is_last())
    order = ReductionOrder(units, reducer, comm)
    gathering = Gathering(units, make_schedule(units, config), comm, residency, order.before_use)
    hooks = ModuleHooks(model, units, gathering, order, is_last, lambda: None)
    for unit in units:
        unit.program = program
    try:
        for _ in range(2):
            program.ops = []
            for at.micro in range(micro_batches):
                loss().backward()
            program.add("step")
            for unit in units:
                if unit.state is not State.SHARDED:
                    unit.reshard()
    finally:
        hooks.remove()
    return program.ops


def make_units(model: nn.Module, config: Config, ranks: int) -> list[RehearsedUnit]:
    """The units of the model on this number of ranks. UsageError if groups of shards do not divide it."""
    zero, residency = config.zero_optimization, Residency()
    threshold = zero.stage3_param_persistence_threshold if zero.stage == 3 else 0
    plans = plan_units(model, threshold, zero.stage3_model_persistence_threshold)
    shards = zero.shards_over(ranks)
    layouts = [UnitLayout([param.shape for param in plan.params], shards, zero.stage == 0) for plan in plans]
    units = [
        RehearsedUnit(number, *each, config, residency) for number, each in enumerate(zip(plans, layouts, strict=True))
    ]
    for unit, home in zip(units, homes(plans, layouts, config), strict=True):
        unit.home = home
    return units


def rehearse_meta(
    shape: transformers.PretrainedConfig,
    config: Config,
    batch: int,
    length: int,
    checkpointing: bool,
    on_accelerator: bool = True,
) -> tuple[nn.Module, list[Op]]:
    """A model on the meta device, and the program of its step, with costs in operations."""
    shape._attn_implementation = "eager"  # the counter does not know fused attention
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.compute_dtype)
    try:
        with torch.device("meta"):
            model = getattr(transformers, shape.architectures[0])(shape).train()
    finally:
        torch.set_default_dtype(before)
    if checkpointing:
        enable_checkpointing(model)
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    zero = config.zero_optimization  # the program is the same on any number of ranks that the groups divide
    units = make_units(model, config, max(2, zero.mics_shard_size, zero.zero_hpz_partition_size))
    with Operations() as done:

        def loss() -> torch.Tensor:
            return model(input_ids=ids, labels=ids, use_cache=False).loss

        return model, rehearse(model, units, config, loss, lambda: done.total, on_accelerator)
