"""What the optimizer's step takes on the device besides gradients, masters and state, for `zero
estimate`.

Element-wise optimizers update one tile at a time. All others update whole tensors, which come to
their owners (`zero/optim/redistribute.py`), each offloaded group by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from zero.config import Config
from zero.optim.adam8bit import PIECE, nbytes
from zero.optim.assignment import owners
from zero.optim.muon import BATCH
from zero.tools.estimate.buffers import Staging
from zero.tools.estimate.states import DEVICE, DISK, Kept, moment_count

# Bytes of an element that an optimizer of torch takes besides: Adam's square roots, in fp32. Fused
# kernels take none.
_TEMPORARY = 4
# Bytes of an element while moments are coded; zero/optim/adam8bit.py does that in pieces.
_CODING = 17


def of_tiles(sharded_groups: Sequence[Kept], config: Config) -> int:
    """Temporary bytes of the largest tile that is updated on the device, element by element."""
    here = [
        param_group
        for param_group in sharded_groups
        if param_group.trainable and not param_group.offloaded
    ]
    if not here:
        return 0
    largest = max(here, key=lambda param_group: param_group.layout.shard_numel)
    numel = min(largest.layout.shard_numel, config.zero_optimization.sub_group_size)
    bf16, count = config.bf16, moment_count(config)
    wide = 4 * bf16.without_masters + 4 * count * (
        bf16.without_masters and bf16.bf16_optimizer_states
    )
    gradient = 4 if largest.gradient < 4 * largest.layout.shard_numel else 0
    step = (wide + gradient + _TEMPORARY) * numel
    if not config.zero_optimization.zero_quantized_moments:
        return step
    decoded = 4 * count * numel
    return decoded + max(step, 2 * nbytes(numel) + _CODING * min(numel, PIECE))


class Tensor(NamedTuple):
    """A tensor that the optimizer sees as a whole. held: its elements on each rank. part: of a
    step.
    """

    group: Kept
    part: int
    group_index: int
    shape: torch.Size
    held: list[int]
    owner: int

    @property
    def moves(self) -> bool:
        return any(numel and rank != self.owner for rank, numel in enumerate(self.held))

    def is_of(self, rank: int) -> bool:
        """Whether this rank updates it."""
        return rank == self.owner or len(self.held) == 1

    @property
    def is_narrow(self) -> bool:
        """Whether its gradient has less than 32 bits."""
        return self.group.gradient < 4 * self.group.layout.shard_numel


def whole_tensors(
    sharded_groups: Sequence[Kept], group_of: Mapping[nn.Parameter, int]
) -> list[Tensor]:
    """All that are trained, with the owners that `zero.optim.assignment` finds.

    At stage 0 each rank owns all.
    """
    held, of, trained = (
        [],
        [],
        [param_group for param_group in sharded_groups if param_group.trainable],
    )
    for param_group in trained:
        ranks = 1 if param_group.layout.replicated else param_group.layout.world_size
        of_slots = [[0] * ranks for _ in param_group.layout.slots]
        for rank in range(ranks):
            for piece in param_group.layout.pieces(rank):
                of_slots[piece.slot][rank] = piece.numel
        held += of_slots
        of += [(param_group, 0, group_of[param], param.shape) for param in param_group.plan.params]
    found = owners(held, [group for _, _, group, _ in of])
    return [Tensor(*known, *each) for known, *each in zip(of, held, found, strict=True)]


def of_whole_tensors(
    sharded_groups: Sequence[Kept],
    group_of: Mapping[nn.Parameter, int],
    config: Config,
    staging: Staging,
) -> tuple[dict[str, int], int]:
    """(Bytes of the optimizer's state by place, bytes that a step takes on the device besides.)

    Ranks own unequal parts: each state is that of the rank that has most of it, and the sum of
    state and step on the device, too. Each offloaded group is a part of the step."""
    visits: dict[tuple[bool, int], list[Tensor]] = {}
    number = {id(param_group.plan): place for place, param_group in enumerate(sharded_groups)}
    tensors = whole_tensors(sharded_groups, group_of)
    for tensor in tensors:
        away = tensor.group.offloaded
        visits.setdefault(
            (away, number[id(tensor.group.plan)] if away else tensor.part), []
        ).append(tensor)
    in_order = [visits[key] for key in sorted(visits)]
    for visit in in_order:
        _stage(visit, staging)
    is_muon = config.optimizer is not None and config.optimizer.type == "Muon"
    states, totals = Counter[str](), [0]
    for rank in range(len(tensors[0].held) if tensors else 0):
        state = Counter[str]()
        for tensor in tensors:
            if tensor.is_of(rank):
                moments = 1 if is_muon and tensor.group_index == 0 else moment_count(config)
                state[tensor.group.home.optimizer] += 4 * moments * tensor.shape.numel()
        states |= state
        totals.append(state[DEVICE] + _most([_visited(visit, rank, is_muon) for visit in in_order]))
    return states, max(totals) - states[DEVICE]


def _stage(visit: Sequence[Tensor], staging: Staging) -> None:
    """Gradient, master and state of an offloaded group go from files to the device and back, one
    after another.
    """
    param_group = visit[0].group
    state = [sum(tensor.held) * 4 for tensor in visit if tensor.owner == 0]
    for size in (param_group.master, param_group.gradient, *state):
        if param_group.place(size) == DISK:
            staging.copy_in(staging.take(size))
    for size in (*state, param_group.master):
        if param_group.place(size) == DISK:
            staging.give([staging.take(size)])


class _Visit(NamedTuple):
    """Bytes on the device of one rank, of one call of the optimizer.

    loads: what is not offloaded for the call; coming: of the exchange that brings tensors; packed:
    copies while it starts; whole: its result; widened: copies of gradients in fp32; updating: what
    the call takes besides; returning: of the exchange that takes tensors back."""

    loads: float = 0
    coming: float = 0
    packed: float = 0
    whole: float = 0
    widened: float = 0
    updating: float = 0
    returning: float = 0


def _visited(visit: Sequence[Tensor], rank: int, is_muon: bool) -> _Visit:
    """Tensors come in fp32 with their gradient, and go back without."""
    param_group, moving = visit[0].group, [tensor for tensor in visit if tensor.moves]
    own = sum(sum(tensor.held) for tensor in moving if tensor.owner == rank)
    held = sum(tensor.held[rank] for tensor in moving)
    owned = [tensor for tensor in visit if tensor.is_of(rank)]
    return _Visit(
        loads=(param_group.master + param_group.gradient) * param_group.offloaded,
        coming=8 * (own + held),
        packed=sum(4 * tensor.held[rank] for tensor in moving if tensor.is_narrow),
        whole=8 * own,
        widened=sum(
            4 * sum(tensor.held) for tensor in owned if not tensor.moves and tensor.is_narrow
        ),
        updating=param_group.state * param_group.offloaded
        + max(_temporary(owned, is_muon), default=0),
        returning=4 * (own + held) + param_group.master * param_group.offloaded,
    )


def _temporary(tensors: Sequence[Tensor], is_muon: bool) -> Iterator[int]:
    """Temporary bytes of one call: of all that is updated as Adam does, and of each batch of Muon's
    matrices.
    """
    alike = Counter(tensor.shape for tensor in tensors if is_muon and tensor.group_index == 0)
    yield _TEMPORARY * sum(
        tensor.shape.numel() for tensor in tensors if not is_muon or tensor.group
    )
    for shape, count in alike.items():
        matrices = min(count, max(1, BATCH // max(1, shape.numel())))
        # The update in fp32; in bf16 the matrices, those before and after an iteration, two
        # products of small sides.
        yield matrices * (10 * shape.numel() + 4 * min(shape) ** 2)


def _most(visits: Sequence[_Visit]) -> int:
    """At the fullest moment of a step."""
    nothing, most = _Visit(), 0.0
    for before, now, after in zip([nothing, *visits], visits, [*visits[1:], nothing], strict=False):
        arriving = before.returning + now.loads + now.coming + max(now.packed, now.whole)
        # The next one comes before this one is updated.
        updated = (
            before.returning + now.loads + now.whole + now.widened + after.loads + after.coming
        )
        most = max(most, arriving, updated + max(after.packed, now.updating, now.returning))
    return round(most)
