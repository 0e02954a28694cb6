"""The optimizer step on shards. Element-wise optimizers update masters sub-group by sub-group,
others as whole tensors.

gradients (sum over ranks, times the loss scale)
  -> global norm and overflow, the same on every rank
  -> per sub-group, now or during the next forward: scale once (mean, unscale, clip)
  -> update the master -> round it into the shard.

Optimizers that are not element-wise: `zero.optim.whole_tensor`
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
import zlib
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zero.comm.clock import label
from zero.comm.communicator import Communicator
from zero.comm.control import Record, hyper_parameters
from zero.comm.fingerprint import explain
from zero.core.forward_writes import ForwardWrites
from zero.core.optimizer_shard import GRADIENTS, MASTERS, MOMENTS, OptimizerShard
from zero.core.param_group import ParamGroup
from zero.core.reduction import GradientReducer
from zero.core.sharded_param import is_copy
from zero.errors import UsageError
from zero.offload.tiers import Tier
from zero.optim import adam8bit, adam_cpu
from zero.optim.background import Updates
from zero.optim.loss_scaler import LossScaler
from zero.optim.redistribute import WholeTensor
from zero.optim.rounding import StochasticRounding
from zero.optim.subgroups import SubGroup, SubGroupState
from zero.optim.update import SubGroupUpdate
from zero.optim.whole_tensor import WholeTensorState

logger = logging.getLogger("zero")

_optimizer_of: WeakKeyDictionary[ParamGroup, weakref.ref[ZeroOptimizer]] = WeakKeyDictionary()


def optimizer_of(group: ParamGroup) -> ZeroOptimizer | None:
    """The optimizer that trains `group`, if there is one."""
    return _optimizer_of.get(group, lambda: None)()


def precise_values(group: ParamGroup) -> torch.Tensor:
    """This rank's slice of the group (1-D) in the most precise form there is: the fp32 master, else
    the shard.
    """
    group.wait_for_update()
    shard = group.optimizer_shard
    return group.shard if shard is None else shard.master


def param_group_of(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, int]:
    """The index of each parameter's param group."""
    return {
        param: index
        for index, param_group in enumerate(optimizer.param_groups)
        for param in param_group["params"]
    }


class NonFiniteGradientError(RuntimeError):
    """Gradients stayed non-finite at the smallest loss scale."""


@dataclass(eq=False, repr=False)
class ZeroOptimizer:
    """Runs `optimizer`, which was made for the model's parameters, on this rank's masters.

    The param groups stay the optimizer's own (learning-rate schedulers act on them). Their `params`
    become sub-groups: 1-D fp32 views of the masters, of at most `sub_group_size` elements.
    `zero.optim.adam_cpu` computes Adam on host memory. For an optimizer that is not element-wise
    they become whole tensors, and all updates are made in `step`.

    Args:
        all_shards: the `OptimizerShard` of each trainable group.
        elementwise: the update of an element depends on nothing but its own history.
        clipping: the largest norm, 0 for none.
        reduce_op: "mean" or "sum" over ranks.
        checks_overflow: a step with non-finite gradients is skipped.
        overlap: groups on the host are updated during the next forward, unless they are persistent.
        buffers, write_behind: `most` and `write_behind` of `Updates`.
        forward_order: gives the groups in the order of a forward, as far as known.
        rounding: rounds bf16 masters, None for fp32 ones.
        state_dtype: see `SubGroupUpdate`.

    Attributes:
        shards: `all_shards` by group.
        sub_groups: the pieces of their masters.
        whole: state of an optimizer of whole tensors, which has no sub-groups, or None.
        grad_norm, overflow: of the last step.
        before_norm: functions to be called in each step, on all ranks, when gradients are reduced.
        writes: what forwards wrote to weights, or None.
        ranks_summed: the number of ranks with parts of the same samples, whose gradients are added.
    """

    optimizer: torch.optim.Optimizer
    reducer: GradientReducer
    comm: Communicator
    all_shards: InitVar[Sequence[OptimizerShard]]
    _: KW_ONLY
    sub_group_size: int
    elementwise: bool = True
    clipping: float = 0.0
    scaler: LossScaler | None = None
    reduce_op: str = "mean"
    checks_overflow: bool = True
    overlap: bool = False
    buffers: int = 0
    write_behind: bool = False
    forward_order: Callable[[], Sequence[ParamGroup]] = tuple
    rounding: StochasticRounding | None = None
    state_dtype: torch.dtype = torch.float32

    def __post_init__(self, all_shards: Sequence[OptimizerShard]) -> None:
        optimizer, comm = self.optimizer, self.comm
        self.shards = {shard.group: shard for shard in all_shards}
        summed = comm.world_size if self.reduce_op == "sum" else 1
        self._reduce_factor = comm.mean_factor * summed
        # Whether each rank can compute the norm itself.
        self._has_all = all(g.layout.replicated and g.training_comm is comm for g in self.shards)
        self.ranks_summed = 1
        self.overflow = False
        self.grad_norm: float | None = None
        self.before_norm: list[Callable[[], None]] = []
        self.writes: ForwardWrites | None = None
        # Not set while a save in the background still copies the state.
        self.read_by_saves = threading.Event()
        self.read_by_saves.set()
        self.model_params = [list(param_group["params"]) for param_group in optimizer.param_groups]
        group_of = param_group_of(optimizer)
        self._number_parameters(group_of)
        on_host = any(shard.tier.device.type == "cpu" for shard in self.shards.values())
        self._is_adam_on_host = self.elementwise and on_host and adam_cpu.serves(optimizer)
        # Its rounding differs from that of torch's operators, so all ranks use it or none.
        lacks_kernel = self._is_adam_on_host and not adam_cpu.is_compiled()
        any_lacks_kernel = comm.control("compiling the optimizer's kernel").any(lacks_kernel)
        self._has_kernel = self._is_adam_on_host and not any_lacks_kernel
        self._updates = Updates(comm.device, self.buffers, self.write_behind, comm.clock.shows)
        master_dtype = torch.float32 if self.rounding is None else torch.bfloat16
        for group, shard in self.shards.items():
            shard.make_master(self._updates, master_dtype)
            _optimizer_of[group] = weakref.ref(self)
        self.whole: WholeTensorState | None = None
        if self.elementwise:
            self._state = SubGroupState(optimizer, all_shards, group_of, self.sub_group_size)
        else:
            self.whole = WholeTensorState(optimizer, all_shards, group_of, comm, self.rounding)
            self._state = self.whole

    def _number_parameters(self, group_of: dict[nn.Parameter, int]) -> None:
        """Number the trained parameters in the order of the param groups, and find this rank's
        pieces of them that count for the norm.
        """
        names = {
            param: name
            for group in self.shards
            for param, name in zip(group.params, group.param_names, strict=True)
        }
        idle = [name for param, name in names.items() if param not in group_of]
        if idle and self.comm.job.rank == 0:
            logger.warning(
                "in no param group of the optimizer, and therefore never updated: %s",
                ", ".join(idle),
            )
        self._numbered = [param for param in group_of if param in names]
        # Names of those that got no gradient in the present step: on any rank, and on this rank
        # when that was agreed.
        self._idle: set[str] = set()
        self._without: set[str] = set()
        self._names = [names[param] for param in self._numbered]
        self._digest = zlib.crc32("\n".join(self._names).encode())
        number_of = {param: number for number, param in enumerate(self._numbered)}
        self._pieces = [
            (number_of[param], shard, piece.start, piece.start + piece.numel)
            for group, shard in self.shards.items()
            for piece in group.pieces
            if (param := group.params[piece.slot]) in number_of and self._counts(group)
        ]
        numbers = [number for number, *_ in self._pieces]
        self._piece_numbers = torch.tensor(numbers, device=self.comm.device)

    def _counts(self, group: ParamGroup) -> bool:
        """Whether this rank counts its shard for the norm: of the ranks with the same one, one
        does.
        """
        same = group.comm if group.layout.replicated else group.comm.replicate_group
        return self._has_all or same.rank == 0

    @property
    def sub_groups(self) -> Sequence[SubGroup]:
        return self._state.sub_groups

    @property
    def units(self) -> Sequence[SubGroup | WholeTensor]:
        """What this rank updates, each with a state of its own."""
        return self.sub_groups if self.whole is None else self.whole.own

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict:
        self.wait()
        return self.optimizer.state

    @property
    def loss_scale(self) -> float:
        """The present factor on the loss; 1 without fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def gradient_factor(self) -> float:
        """What a stored gradient must be multiplied by to be the gradient: the mean (or sum) over
        ranks, unscaled.
        """
        return self._reduce_factor / self.loss_scale * self.ranks_summed

    # -- step

    @torch.no_grad()
    def step(self) -> bool:
        """Apply the accumulated gradients.

        Returns False if they were not finite and the step was skipped on every rank.
        """
        for group in self._agree():
            self.reducer.reduce(group)
        for group in self.shards:
            self.reducer.reduce_rest(group)
        self.reducer.drain()
        for act in self.before_norm:
            act()
        to_mean = self.gradient_factor
        sum_up = partial(self._global_norm, self._own_squares())
        norm = self.comm.watchdog.wait(sum_up, "the norm of the gradients")
        self.grad_norm = norm * to_mean
        self.overflow = self.checks_overflow and not math.isfinite(self.grad_norm)
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
        if self.writes is not None:
            self.writes.end_of_step()
        self.zero_grad()
        return not self.overflow

    def train(self) -> None:
        """Show the weights for training.

        Schedule-free optimizers have others for evaluation. Every rank must call.
        """
        self._switch("train")

    def eval(self) -> None:
        """Show the weights for evaluation and for saving; see `train`."""
        self._switch("eval")

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        if not hasattr(self.optimizer, mode) or all(
            param_group.get("train_mode") is (mode == "train") for param_group in self.param_groups
        ):
            return
        if self.whole is None:
            name, key = type(self.optimizer).__name__, "zero_optimization.elementwise_optimizer"
            raise UsageError(
                f"optimizer {name} has {mode}(), which needs whole tensors: delete {key}"
            )
        self.wait()
        if self.rounding is not None:
            self.rounding.begin_step(0)
        self.whole.switch(mode)
        for group in self.shards:
            group.refresh()

    def wait(self) -> None:
        """Block until the last step's update is complete. Raises the error of a late update that
        failed.

        The caller may change the state afterwards. So this also waits for a save that still has to
        read it."""
        self._wait_for_updates()
        self._updates.forget_ahead()

    def _wait_for_updates(self) -> None:
        self.read_by_saves.wait()
        self._updates.wait()

    def end_updates(self) -> None:
        """Finish late updates, or forget them if they have failed: the values will be replaced or
        freed.
        """
        try:
            self.wait()
        except Exception as error:
            logger.warning("the last update was not finished: %s", error)
        self._updates.drop()
        for shard in self.shards.values():
            shard.forget_writes()

    def free(self) -> None:
        """Free masters and gradients: the groups have no optimizer any more."""
        for group, shard in self.shards.items():
            shard.free()
            _optimizer_of.pop(group, None)

    def spoil(self, why: str) -> None:
        """Mark the values as unusable: until `end_updates`, everything that waits for them raises
        this error.
        """
        self._updates.fail(RuntimeError(why))

    def _update(self, factor: float) -> None:
        if self.rounding is not None:
            self.rounding.begin_step()
        state = self._state
        if isinstance(state, WholeTensorState):
            try:
                with label("update of whole tensors"):
                    state.update(factor, self._idle)
            except BaseException as error:
                self._updates.fail(error)
                raise
            for group in self.shards:
                group.refresh()
            return
        # torch's schedulers ask whether step() was called.
        self.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        update = SubGroupUpdate(
            self.optimizer,
            factor,
            # Checked in each step: scripts put hooks on their optimizers at any time.
            is_plain_adam=self._is_adam_on_host and adam_cpu.serves(self.optimizer),
            has_kernel=self._has_kernel,
            rounding=self.rounding,
            state_dtype=self.state_dtype,
        )
        if self._idle:
            self.split_sub_groups(self._idle.__contains__)
        trained = [each for each in self.sub_groups if not self._is_idle(each)]
        now = [each for each in trained if not self._can_wait(each.group)]
        self._updates.run(now, update)
        for group in self.shards:
            group.refresh()
        if later := [each for each in trained if self._can_wait(each.group)]:
            order = dict.fromkeys((*self.forward_order(), *self.shards))
            place = {group: number for number, group in enumerate(order)}
            self._updates.start(sorted(later, key=lambda each: place[each.group]), update)

    def split_sub_groups(self, kind: Callable[[str], Hashable]) -> None:
        """Split sub-groups so that `kind`, a function of a parameter's name, has one value for all
        parameters of each.
        """
        self._updates.forget_ahead()
        if isinstance(self._state, SubGroupState):
            coded = self.state_dtype == torch.uint8
            self._state.split_by(kind, adam8bit.BLOCK if coded else 1)

    def _is_idle(self, sub_group: SubGroup) -> bool:
        """Whether the parameters of a sub-group, which are alike in this, got no gradient."""
        return bool(self._idle) and any(name in self._idle for name, *_ in sub_group.parts())

    def _can_wait(self, group: ParamGroup) -> bool:
        """Whether the group may be updated after the step: not if all ranks gather it there, nor on
        an accelerator.
        """
        may_wait = self.overlap and not (group.persistent or group.has_aliases)
        return may_wait and not self.shards[group].tier.is_accelerator

    # -- moves

    def _move_state(self, shard: OptimizerShard, tier: Tier) -> None:
        """Bring the optimizer's state of one group to `tier`."""

        def moved(value: torch.Tensor) -> torch.Tensor:
            return tier.keep(value.reshape(-1)).view(value.shape) if value.dim() else value

        for unit in self.units:
            if unit.shard is shard:
                unit.state.update(tree_map_only(torch.Tensor, moved, dict(unit.state)))

    def move(self, names: Collection[str], tier: Tier) -> None:
        """Move these of `STATES` (`zero.core.optimizer_shard`) to `tier`, but for weights, which
        groups move. What the configuration offloads stays where it is. Values never change.
        """
        for group, shard in self.shards.items():
            if shard.is_offloaded:
                continue
            if GRADIENTS in names:
                shard.move_gradient(tier)
                gradients = self.reducer.gradients[group]
                if gradients.carried is not None:
                    gradients.carried = tier.keep(gradients.carried)
            if MASTERS in names and not shard.shares_weights:
                shard.master = tier.keep(shard.master)
            if MOMENTS in names:
                self._move_state(shard, tier)
        self._state.follow_masters()

    def state_dict(self) -> dict:
        """This rank's part of the state, as torch gives it.

        `engine.save_checkpoint` saves all ranks' parts.
        """
        self.wait()
        return self.optimizer.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the accumulated gradients."""
        self.reducer.clear()
        for shard in self.shards.values():
            # Memory that is freed on a device can be used by the next forward. Background updates,
            # which still read their gradients, only concern shards on the host.
            if shard.tier.is_accelerator:
                shard.grad = None

    # -- what ranks agree on in each step

    def _agree(self) -> list[ParamGroup]:
        """Raise UsageError, on all ranks, unless they are about to take the same step; no weight
        has changed then. An error of one rank is raised on all. Find the parameters without a
        gradient.

        Returns the groups of which any rank has gradients that are not reduced yet."""
        comm, rest, without = self.comm, [], set[str]()

        def prepare() -> Record:
            rest.extend(self._prepare_step())
            without.update(self.reducer.without_gradient())
            without.intersection_update(self._names)
            # What was agreed before still holds while it has changed on no rank.
            return self._record(without, bool(rest) or without != self._without)

        control = comm.control("an optimizer step")
        world = next(ranks for ranks in comm.worlds if control.rank in ranks)
        try:
            is_incomplete = control.require_same(prepare, comm.worlds)
        except UsageError:
            orders = control.exchange(lambda: comm.order)
            of_own = [orders[rank] for rank in world]
            if any(order.digests != comm.order.digests for order in of_own):
                raise UsageError(explain([order.recent for order in of_own])) from None
            raise
        self.reducer.earlier_backwards += self.reducer.backwards
        if comm.matches_by_order:
            comm.order.start_over()
        if self.writes is not None:
            self.writes.digest = 0
        if not is_incomplete:
            return []
        serials = {group.serial for group in rest}
        idle = {number for number, name in enumerate(self._names) if name in without}
        own = serials, idle, self._digest
        for rank, told in enumerate(control.exchange(lambda: own)):
            if rank in world:
                serials |= told[0]
            if told[2] == self._digest:  # also ranks that have other parts of the same parameters
                idle &= told[1]
        self._idle, self._without = {self._names[number] for number in idle}, without
        return [group for group in self.shards if group.serial in serials]

    def _prepare_step(self) -> list[ParamGroup]:
        """End what is under way. Returns the groups of which this rank has gradients that are not
        reduced yet.
        """
        if len(self.param_groups) != len(self.model_params):
            raise UsageError(
                "a param group was added to the optimizer after zero.initialize, which has sharded "
                "the others: "
                "make all groups before, with a learning rate of 0 if they are to train later"
            )
        with self.comm.clock.waiting("optimizer"):
            self._wait_for_updates()
        if self.writes is not None:
            self.writes.between_passes()
        self.reducer.drain()
        return self.reducer.collect_rest()

    def _record(self, without: Collection[str], flag: bool) -> Record:
        """What must be equal on all ranks, or on those of a pipeline stage. `without`: names of
        parameters without a gradient on this rank.
        """
        # The number of sub-groups is left out: a rank may have no part of a small group.
        numbers = hyper_parameters(self.param_groups).items()
        facts: dict[str, object] = {
            key: each for key, each in numbers if not key.endswith(", params")
        }
        facts["backwards since the last step"] = self.reducer.backwards
        if self.writes is not None:
            facts["parameters that forwards wrote to, and their values"] = self.writes
        with torch._C.DisableTorchFunctionSubclass():  # sharded parameters look at each access
            frozen = [
                name
                for name, param in zip(self._names, self._numbered, strict=True)
                if name in without and not param.requires_grad
            ]
        viewed = [group.name for group in self.shards if group.has_aliases]
        of_stage: dict[str, object] = {
            "frozen parameters": ", ".join(frozen) or "none",
            "groups with weights that a module keeps views of": ", ".join(viewed) or "none",
        }
        if self.comm.matches_by_order:
            of_stage["order of collectives"] = self.comm.order.digests
        return Record(facts, of_stage, flag)

    # -- norm

    def _own_squares(self) -> torch.Tensor:
        """For each parameter, the sum of squares of this rank's part of its gradient."""
        squares = torch.zeros(len(self._names), dtype=torch.float64, device=self.comm.device)
        if self._pieces:
            norms = torch.stack(self._norms_of_pieces()).to(torch.float64)
            squares.index_copy_(0, self._piece_numbers, norms**2)
        return squares

    def _global_norm(self, squares: torch.Tensor) -> float:
        """2-norm of the reduced, still scaled gradient over all ranks: as in torch, the norm of
        parameters' norms. `squares`: of this rank.
        """
        if not self._has_all:
            squares = self.comm.all_reduce(squares)
        self._param_norms = squares.sqrt().float()
        norm = torch.linalg.vector_norm(self._param_norms).double()
        # Parts of a parameter count once each, and copies not at all.
        if self.comm.model is not None:
            copies = torch.tensor([is_copy(each) for each in self._numbered])
            copies = copies.to(squares.device, non_blocking=True)
            of_own = squares.masked_fill(copies, 0).sum().view(1)
            norm = self.comm.model.all_reduce(of_own)[0].sqrt()
        # The one moment of a step at which the host waits for the device.
        return norm.item()

    def _norms_of_pieces(self) -> list[torch.Tensor]:
        """2-norms of this rank's pieces of gradients, scalars on the compute device."""
        norms = [shard.norms.get(start) for _, shard, start, _ in self._pieces]
        unknown = [
            shard.grad[start:end]
            for (_, shard, start, end), norm in zip(self._pieces, norms, strict=True)
            if norm is None and shard.grad is not None
        ]
        found = iter(torch._foreach_norm(unknown, dtype=torch.float32) if unknown else ())
        return [(next(found) if norm is None else norm).to(self.comm.device) for norm in norms]

    def _clip_coefficient(self) -> float:
        """As `torch.nn.utils.clip_grad_norm_`."""
        if self.grad_norm is None or self.clipping <= 0:
            return 1.0
        return min(1.0, self.clipping / (self.grad_norm + 1e-6))

    def _explain_non_finite(self) -> str:
        """Names the model's first parameter with a non-finite gradient on any rank."""
        finite = self._param_norms.isfinite()
        name = f"parameter {self._names[int(torch.argmin(finite.int()))]!r}"
        if finite.all():
            name = "a parameter of another pipeline stage"
        if self.scaler is None:
            return f"the gradient of {name} is not finite; this step was skipped on every rank"
        return (
            f"the gradient of {name} is not finite at the minimum loss scale {self.loss_scale:g}; "
            "no step was taken. Models pre-trained in bf16, T5 among them, overflow in fp16: use "
            "bf16 (--bf16) or "
            "fp32; else look for a learning rate that is too high or for non-finite inputs"
        )
