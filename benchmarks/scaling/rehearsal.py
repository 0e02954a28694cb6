"""Records the program of one training step: what the engine computes, gathers, waits for and
reduces, and in which order.

`rehearse` runs the engine's own hooks and policies (`zero.core.hooks`, `zero.core.gathering`,
`zero.core.reduction`) over a model, on groups that move nothing and record what is asked of
them. The model may be on the meta device, and of any size. `tests/accelerator/test_timeline.py`
compares such programs with what the engine does on the simulated accelerator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.scaling.rehearsed_groups import NO_COMMUNICATOR, CountedGroup, Home, homes
from zero.build import make_schedule
from zero.config import Config
from zero.core.gathering import Gathering
from zero.core.hooks import ModuleHooks
from zero.core.layout import GroupLayout, GroupPlan, plan_groups
from zero.core.micro_batches import MicroBatches
from zero.core.param_group import State
from zero.core.reduction import GroupGradients, ReductionOrder
from zero.core.schedule import Residency
from zero.tools.estimate.calls import operations
from zero.tools.estimate.model import enable_checkpointing


class Op(NamedTuple):
    """`kind`: "compute" (`cost`: operations or seconds), "gather", "use", "reduce", "backward ends"
    or "step".
    """

    kind: str
    group: int = -1
    cost: float = 0.0


class Operations(TorchDispatchMode):
    """Counts floating-point operations, by torch's formulas, in `total`. (torch's own counter takes
    twice as long.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True  # a question about a mask's values
        out = func(*args, **(kwargs or {}))
        self.total += operations(func, args, kwargs or {}, out)
        return out


class Program:
    """Collects operations. `clock` gives the operations or seconds that were computed so far."""

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.ops = []
        self._before = clock()

    def add(self, kind: str, group: int = -1) -> None:
        now = self.clock()
        if now > self._before:
            self.ops.append(Op("compute", -1, now - self._before))
        self.ops.append(Op(kind, group))
        self._before = self.clock()


class RehearsedGroup(CountedGroup):
    """As much of a group as the hooks and policies see.

    It moves nothing, and writes down what is asked for.
    """

    def __init__(
        self,
        number: int,
        plan: GroupPlan,
        layout: GroupLayout,
        config: Config,
        residency: Residency,
    ):
        persistent = plan.persistent or config.zero_optimization.stage < 3
        super().__init__(layout, persistent, residency)
        self.number = number
        self.modules = plan.modules
        self.params = plan.params
        self.index = {param: i for i, param in enumerate(plan.params)}
        self.param_names = plan.param_names
        self.shared = plan.shared
        self.has_aliases = False
        self.training_comm = None
        self.trainable = plan.params[0].requires_grad
        self.full = torch.empty(1)
        self.program: Program | None = None
        self.home: Home | None = None

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

    def __init__(self, program: Program, micro_batches: MicroBatches, deferred: bool):
        self._program, self._deferred = program, deferred
        self._micro_batches = micro_batches
        self.backwards = self.earlier_backwards = 0
        self.gradients: dict[RehearsedGroup, GroupGradients] = defaultdict(GroupGradients)

    def collect(self, group: RehearsedGroup, index: int) -> None:
        group.params[index].grad = None
        self.gradients[group].parts[index] = None

    def note_frozen(self) -> None:
        """Do nothing: no parameter is frozen while steps are rehearsed."""

    def reduce(self, group: RehearsedGroup) -> None:
        self.gradients[group].parts = {}
        if self._micro_batches.reduces_now or not self._deferred:
            self._program.add("reduce", group.number)

    @property
    def keeps_on_rank(self) -> bool:
        return self._deferred and not self._micro_batches.reduces_now

    def keep_up(self) -> None:
        """Do nothing: reductions take no time while steps are rehearsed."""

    drain = keep_up

    def end_backward(self) -> None:
        self._program.add("backward ends")


def rehearse(
    model: nn.Module,
    groups: Sequence[RehearsedGroup],
    config: Config,
    loss: Callable[[], torch.Tensor],
    clock: Callable[[], float],
    on_accelerator: bool,
) -> list[Op]:
    """The program of the second step, after which nothing changes any more.

    `loss` runs the model's forward.
    """
    program, residency, stage = Program(clock), groups[0].residency, config.zero_optimization.stage
    micro_batches = MicroBatches(config.gradient_accumulation_steps or 1)
    comm = SimpleNamespace(
        **vars(NO_COMMUNICATOR),
        matches_by_order=on_accelerator,
        device="cpu",
        broadcast=lambda tensor, src: None,
        all_reduce=lambda tensor: tensor,
    )

    reducer = RehearsedReducer(program, micro_batches, deferred=stage < 2)
    order = ReductionOrder(groups, reducer, comm)
    gathering = Gathering(groups, make_schedule(groups, config), comm, residency, order)
    hooks = ModuleHooks(model, groups, gathering, order, micro_batches)
    for group in groups:
        group.program = program
    try:
        for _ in range(2):
            program.ops = []
            for _ in range(micro_batches.steps):
                loss().backward()
                micro_batches.count += 1
            program.add("step")
            for group in groups:
                if group.state is not State.SHARDED:
                    group.reshard()
    finally:
        hooks.remove()
    return program.ops


def make_groups(model: nn.Module, config: Config, ranks: int) -> list[RehearsedGroup]:
    """The groups of the model on this number of ranks.

    UsageError if groups of shards do not divide it.
    """
    zero, residency = config.zero_optimization, Residency()
    threshold = zero.stage3_param_persistence_threshold if zero.stage == 3 else 0
    plans = plan_groups(model, threshold, zero.stage3_model_persistence_threshold)
    shards = zero.shards_over(ranks)
    layouts = [
        GroupLayout([param.shape for param in plan.params], shards, zero.stage == 0)
        for plan in plans
    ]
    groups = [
        RehearsedGroup(number, *each, config, residency)
        for number, each in enumerate(zip(plans, layouts, strict=True))
    ]
    for group, home in zip(groups, homes(plans, layouts, config), strict=True):
        group.home = home
    return groups


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
    zero = (
        config.zero_optimization
    )  # the program is the same on any number of ranks that the groups divide
    groups = make_groups(model, config, max(2, zero.mics_shard_size, zero.zero_hpz_partition_size))
    with Operations() as done:

        def loss() -> torch.Tensor:
            return model(input_ids=ids, labels=ids, use_cache=False).loss

        return model, rehearse(model, groups, config, loss, lambda: done.total, on_accelerator)
