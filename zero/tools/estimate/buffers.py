"""Host memory that a rank keeps for transfers, for `zero estimate`: it is taken once, and used
again in each step.

Sizes alone are followed here, as the engine takes and frees its buffers: tiles
(`zero/optim/background.py`), pinned ones between files and the device (`zero/offload/tiers.py`),
requests (`zero/offload/nvme.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from zero.config import Config
from zero.offload.nvme import request_bytes
from zero.offload.pinned import PAGE, round_up
from zero.tools.estimate.states import DISK, HOST, Kept, moment_count


class Pool:
    """As `zero.offload.pinned.HostMemory`.

    Attribute `nbytes`: of all blocks that were ever taken.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._free = []

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
    """As the pinned buffers of `zero.offload.tiers`: two of those that were read may wait for their
    copy.
    """

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


def make_staging(groups: Sequence[Kept], item: int) -> Staging:
    """The buffers after `initialize`, where weights and masters go from the device to files, one
    after another.
    """
    staging = Staging()
    for group in groups:
        if group.home.weights == DISK:
            staging.give([staging.take(group.layout.shard_numel * item)])
        if group.place(group.master) == DISK and not group.shares_weights:
            staging.give([staging.take(group.master)])
    return staging


def tiles(groups: Sequence[Kept], config: Config) -> Iterator[tuple[Kept, int]]:
    """Each tile that is updated on the host, with its elements, in the order of a step."""
    most = config.zero_optimization.sub_group_size
    for group in sorted(
        (group for group in groups if group.offloaded), key=lambda group: not group.plan.persistent
    ):
        for start in range(0, group.layout.shard_numel, most):
            yield group, min(most, group.layout.shard_numel - start)


def of_updates(groups: Sequence[Kept], config: Config) -> tuple[int, int]:
    """Bytes of the buffers of element-wise updates on the host: (pinned: rounded weights; pageable:
    tiles of files).

    The first step makes the optimizer's state, later ones read it.
    """
    offload, rounded, memory = config.zero_optimization.offload_optimizer, Pool(), Pool()
    every = list(tiles(groups, config))
    for makes_state in (True, False):
        writing: tuple[list[int], list[int]] = [], []
        ahead: list[list[int]] | None = None
        for number, (group, numel) in enumerate(every):
            read, ahead = ahead or _read(memory, group, numel, config, makes_state), None
            if offload.pipeline_read and number + 1 < len(every):
                ahead = _read(memory, *every[number + 1], config, makes_state)
            weights = (
                [rounded.take(nbytes)] if (nbytes := _rounded_bytes(group, numel, config)) else []
            )
            _free(writing, memory, rounded)
            gradient, values = read
            memory.give(gradient)
            writing = values, weights
            if offload.device == "nvme" and not offload.pipeline_write:
                _free(writing, memory, rounded)
                writing = [], []
        _free(writing, memory, rounded)
    return rounded.nbytes, memory.nbytes + _wide_bytes(
        max((numel for _, numel in every), default=0), config
    )


def _wide_bytes(numel: int, config: Config) -> int:
    """Bytes of the fp32 values of a tile that is kept in bf16."""
    if not config.bf16.without_masters:
        return 0
    return numel * 4 * (1 + moment_count(config) * config.bf16.bf16_optimizer_states)


def _free(writing: tuple[list[int], list[int]], memory: Pool, rounded: Pool) -> None:
    for pool, blocks in zip((memory, rounded), writing, strict=True):
        pool.give(blocks)


def _read(
    memory: Pool, group: Kept, numel: int, config: Config, makes_state: bool
) -> list[list[int]]:
    """The buffers of a tile's gradient, and of its master and state: of those that are in a file."""
    share, count = numel / group.layout.shard_numel, moment_count(config)
    gradient = [memory.take(group.gradient * share)] if group.place(group.gradient) == DISK else []
    values = []
    if group.place(group.master) == DISK:
        if not (group.shares_weights and group.home.weights == HOST):
            values.append(memory.take(group.master * share))
        if not makes_state:
            values += [memory.take(group.state / count * share) for _ in range(count)]
    return [gradient, values]


def _rounded_bytes(group: Kept, numel: int, config: Config) -> int:
    """Bytes of a tile's 16-bit weights before they go to another place."""
    item, in_memory = (
        config.compute_dtype.itemsize,
        group.home.weights == HOST
        or (config.zero_optimization.offloads_params and group.plan.persistent),
    )
    return 0 if in_memory or item == 4 or config.bf16.without_masters else numel * item


def of_requests(groups: Sequence[Kept], config: Config) -> int:
    """Bytes of aligned buffers for requests of memory that is not aligned: new state, and masters
    that are made.
    """
    size, most = request_bytes(config.aio), 0
    for group, numel in tiles(groups, config):
        if group.place(group.master) == DISK:
            new_state = group.state * numel / group.layout.shard_numel
            most = max(
                most, -(-new_state // size), 0 if group.shares_weights else -(-group.master // size)
            )
    return min(config.aio.thread_count, most) * size
