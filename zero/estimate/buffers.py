"""Host memory that a rank keeps for transfers, for `zero estimate`: it is taken once, and used again in each step.

Sizes alone are followed here, as the engine takes and frees its buffers: tiles (`zero/optim/updates.py`), pinned ones
between files and the device (`zero/offload/tiers.py`), requests (`zero/offload/files.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from zero.config import Config
from zero.estimate.states import DISK, HOST, Kept, moment_count
from zero.offload.files import request_bytes
from zero.offload.memory import PAGE, round_up
from zero.optim.ownership import owners, parts


class Pool:
    """As `zero.offload.memory.HostMemory`. Attribute `nbytes`: of all blocks that were ever taken."""

    def __init__(self) -> None:
        self.nbytes, self._free = 0, []

    def take(self, nbytes: float) -> int:
        """The size of the block, which `give` gets."""
        size = round_up(int(nbytes), PAGE)
        fitting = [block for block in self._free if size <= block <= 2 * size]
        if fitting:
            self._free.remove(min(fitting))
            return min(fitting)
        self.nbytes += size
        return size

    def give(self, blocks: Sequence[int]) -> None:
        self._free += blocks


class Staging(Pool):
    """As the pinned buffers of `zero.offload.tiers`: two of those that were read may wait for their copy."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: deque[int] = deque()

    def take(self, nbytes: float) -> int:
        while len(self._copies) > 1:
            self.give([self._copies.popleft()])
        return super().take(nbytes)

    def copy_in(self, block: int) -> None:
        """What was read into `block` is copied to the device from now on."""
        self._copies.append(block)


def make_staging(units: Sequence[Kept], item: int) -> Staging:
    """The buffers after `initialize`, where weights and masters go from the device to files, one after another."""
    staging = Staging()
    for unit in units:
        if unit.home.weights == DISK:
            staging.give([staging.take(unit.layout.shard_numel * item)])
        if unit.place(unit.master) == DISK and not unit.shares_weights:
            staging.give([staging.take(unit.master)])
    return staging


def tiles(units: Sequence[Kept], config: Config) -> Iterator[tuple[Kept, int]]:
    """Each tile that is updated on the host, with its elements, in the order of a step."""
    most = config.zero_optimization.sub_group_size
    for unit in sorted((unit for unit in units if unit.offloaded), key=lambda unit: not unit.plan.persistent):
        for start in range(0, unit.layout.shard_numel, most):
            yield unit, min(most, unit.layout.shard_numel - start)


def of_updates(units: Sequence[Kept], config: Config) -> tuple[int, int]:
    """Bytes of the buffers of element-wise updates on the host: (pinned: rounded weights; pageable: tiles of files).

    The first step makes the optimizer's state, later ones read it.
    """
    offload, rounded, memory = config.zero_optimization.offload_optimizer, Pool(), Pool()
    every = list(tiles(units, config))
    for makes_state in (True, False):
        writing: tuple[list[int], list[int]] = [], []
        ahead: list[list[int]] | None = None
        for number, (unit, numel) in enumerate(every):
            read, ahead = ahead or _read(memory, unit, numel, config, makes_state), None
            if offload.pipeline_read and number + 1 < len(every):
                ahead = _read(memory, *every[number + 1], config, makes_state)
            weights = [rounded.take(nbytes)] if (nbytes := _rounded_bytes(unit, numel, config)) else []
            _free(writing, memory, rounded)
            gradient, values = read
            memory.give(gradient)
            writing = values, weights
            if offload.device == "nvme" and not offload.pipeline_write:
                _free(writing, memory, rounded)
                writing = [], []
        _free(writing, memory, rounded)
    return rounded.nbytes, memory.nbytes + _wide_bytes(max((numel for _, numel in every), default=0), config)


def _wide_bytes(numel: int, config: Config) -> int:
    """Bytes of the fp32 values of a tile that is kept in bf16."""
    if not config.bf16.without_masters:
        return 0
    return numel * 4 * (1 + moment_count(config) * config.bf16.bf16_optimizer_states)


def _free(writing: tuple[list[int], list[int]], memory: Pool, rounded: Pool) -> None:
    for pool, blocks in zip((memory, rounded), writing, strict=True):
        pool.give(blocks)


def _read(memory: Pool, unit: Kept, numel: int, config: Config, makes_state: bool) -> list[list[int]]:
    """The buffers of a tile's gradient, and of its master and state: of those that are in a file."""
    share, count = numel / unit.layout.shard_numel, moment_count(config)
    gradient = [memory.take(unit.gradient * share)] if unit.place(unit.gradient) == DISK else []
    values = []
    if unit.place(unit.master) == DISK:
        if not (unit.shares_weights and unit.home.weights == HOST):
            values.append(memory.take(unit.master * share))
        if not makes_state:
            values += [memory.take(unit.state / count * share) for _ in range(count)]
    return [gradient, values]


def _rounded_bytes(unit: Kept, numel: int, config: Config) -> int:
    """Bytes of a tile's 16-bit weights before they go to another place."""
    item, in_memory = (
        config.compute_dtype.itemsize,
        unit.home.weights == HOST or (config.zero_optimization.offloads_params and unit.plan.persistent),
    )
    return 0 if in_memory or item == 4 or config.bf16.without_masters else numel * item


def of_requests(units: Sequence[Kept], config: Config) -> int:
    """Bytes of aligned buffers for requests of memory that is not aligned: new state, and masters that are made."""
    size, most = request_bytes(config.aio), 0
    for unit, numel in tiles(units, config):
        if unit.place(unit.master) == DISK:
            new_state = unit.state * numel / unit.layout.shard_numel
            most = max(most, -(-new_state // size), 0 if unit.shares_weights else -(-unit.master // size))
    return min(config.aio.thread_count, most) * size


class Tensor(NamedTuple):
    """A tensor that the optimizer sees as a whole. held: its elements on each rank. part: of a step."""

    unit: Kept
    part: int
    held: list[int]
    owner: int

    @property
    def moves(self) -> bool:
        return any(numel and rank != self.owner for rank, numel in enumerate(self.held))


def whole_tensors(units: Sequence[Kept], group_of: Mapping[nn.Parameter, int]) -> list[Tensor]:
    """All that are trained, with the owners that `zero.optim.ownership` finds. At stage 0 each rank owns all."""
    held, of, trained = [], [], [unit for unit in units if unit.trainable]
    for unit, part in zip(trained, parts([unit.layout for unit in trained]), strict=True):
        ranks = 1 if unit.layout.replicated else unit.layout.world_size
        of_slots = [[0] * ranks for _ in unit.layout.slots]
        for rank in range(ranks):
            for piece in unit.layout.pieces(rank):
                of_slots[piece.slot][rank] = piece.numel
        held += of_slots
        of += [(unit, part, group_of[param]) for param in unit.plan.params]
    found = owners(held, [(part, group) for _, part, group in of])
    return [Tensor(unit, part, *each) for (unit, part, _), *each in zip(of, held, found, strict=True)]


def of_whole_tensors(units: Sequence[Kept], group_of: Mapping[nn.Parameter, int], staging: Staging) -> int:
    """Bytes on the device of the rank that needs most in a step, as `zero.optim.exchange` brings tensors to owners.

    While one part is updated, the next one comes and the last one goes back. Each offloaded unit is a part.
    """
    visits: dict[tuple[bool, int], list[Tensor]] = {}
    number = {id(unit.plan): place for place, unit in enumerate(units)}
    tensors = whole_tensors(units, group_of)
    for tensor in tensors:
        away = tensor.unit.offloaded
        visits.setdefault((away, number[id(tensor.unit.plan)] if away else tensor.part), []).append(tensor)
    in_order = [visits[key] for key in sorted(visits)]
    for visit in in_order:
        _stage(visit, staging)
    return max((_visited(in_order, rank) for rank in range(len(tensors[0].held))), default=0) if tensors else 0


def _stage(visit: Sequence[Tensor], staging: Staging) -> None:
    """Gradient, master and state of an offloaded unit go from files to the device and back, one after another."""
    unit = visit[0].unit
    state = [sum(tensor.held) * 4 for tensor in visit if tensor.owner == 0]
    for nbytes in (unit.master, unit.gradient, *state):
        if unit.place(nbytes) == DISK:
            staging.copy_in(staging.take(nbytes))
    for nbytes in (*state, unit.master):
        if unit.place(nbytes) == DISK:
            staging.give([staging.take(nbytes)])


def _visited(visits: Sequence[Sequence[Tensor]], rank: int) -> int:
    """Bytes on the device of one rank, in fp32: tensors come with their gradient, and go back without."""
    most = former = back = 0
    for visit in visits:
        unit, moving = visit[0].unit, [tensor for tensor in visit if tensor.moves]
        own = sum(sum(tensor.held) for tensor in moving if tensor.owner == rank)
        held = sum(tensor.held[rank] for tensor in moving)
        loads = (unit.master + unit.gradient + unit.state) * unit.offloaded
        widened = sum(
            4 * tensor.held[rank]
            for tensor in visit
            if not tensor.moves and tensor.owner == rank and tensor.unit.gradient < 4 * tensor.unit.layout.shard_numel
        )
        values = 8 * own + widened + loads
        most = max(most, former + 8 * (own + held) + loads, back + 8 * (own + held) + values)
        former, back = values, 4 * (own + held)
    return round(most)
