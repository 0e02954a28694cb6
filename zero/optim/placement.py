"""What part of the offloaded state stays on the compute device: `offload_optimizer.ratio`.

A number is the share that goes away. With "auto" everything goes at first; when a few steps have shown how much memory
training takes, as many units as fit come back for good, with gradient, master, moments and weights. A reserve stays
free, and where it is touched later on, units go away again. Numbers never change by it.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from zero.offload.tiers import Tier
from zero.optim.updates import Tile
from zero.unit import Unit

# Steps after which memory has been seen at its fullest: the first makes the optimizer's state, the second runs with it.
STEPS_TO_WATCH = 2


def headroom(device: torch.device) -> tuple[int, int]:
    """(bytes that were still free when memory was fullest, bytes of it in all), for this rank's part of the host."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device), total
    known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available, total = (int(known[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    limit, used = _of_container("memory.max"), _of_container("memory.current")
    if limit is not None and used is not None:
        cached = _of_container("memory.stat", "file") or 0
        available, total = min(available, limit - used + cached), min(total, limit)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return available // ranks - max(0, peak - resident), total // ranks


def _of_container(name: str, line: str = "") -> int | None:
    """A number of this process's control group (version 2), in one of the file's lines; None if there is none."""
    path = Path("/sys/fs/cgroup") / name
    lines = path.read_text().splitlines() if path.exists() else []
    text = next((text.removeprefix(line).strip() for text in lines if text.startswith(line)), "")
    return int(text) if text.isdigit() else None


class Placement:
    """Decides for each unit where its optimizer's part lives.

    Args: units: in the order in which a forward needs them: the first ones stay, since their update is the one that
    has no time to hide; here, away: the two places; ratio: a number from 0 to 1, or "auto".
    """

    def __init__(self, units: Sequence[Unit], here: Tier, away: Tier, ratio: float | str):
        self.here, self.away = here, away
        self.units, self.automatic = list(units), ratio == "auto" and here != away
        self._steps = 0
        stays = 0 if ratio == "auto" else (1 - ratio) * sum(unit.layout.shard_numel for unit in units)
        for unit in units:
            fits = unit.layout.shard_numel <= stays
            stays -= unit.layout.shard_numel if fits else 0
            unit.optimizer_tier = here if fits else away

    def adjust(self, tiles: Sequence[Tile], state: dict) -> None:
        """At the beginning of a step, nothing being under way: bring units here while there is room, or send them away.

        `state` is the optimizer's, by tile.
        """
        self._steps += 1
        if not self.automatic or self._steps < STEPS_TO_WATCH:
            return
        # The least of all ranks: they gather in one order, which depends on where weights are.
        comm, room = self.units[0].comm, headroom(self.here.device)
        free, total = comm.all_reduce(torch.tensor(room, device=comm.device), op="min").tolist()
        reserve = max(1 << 30, total // 10)
        near = [unit for unit in self.units if unit.optimizer_tier == self.here]
        if self._steps == STEPS_TO_WATCH:
            for unit in self.units:
                size = _bytes_of(unit, tiles, state)
                if free - size >= reserve:
                    free -= size
                    _move(unit, self.here, tiles, state)
        elif free < reserve // 2 and near:
            while near and free < reserve:
                free += _bytes_of(near[-1], tiles, state)
                _move(near.pop(), self.away, tiles, state)
        else:
            return
        self._tell(free, reserve)

    def _tell(self, free: int, reserve: int) -> None:
        here = [unit for unit in self.units if unit.optimizer_tier == self.here]
        numel, total = (sum(unit.layout.shard_numel for unit in units) for units in (here, self.units))
        if self.units[0].comm.rank == 0:
            print(
                f"zero_optimization.offload_optimizer.ratio: auto is {1 - numel / total:.2f}: {len(here)} of "
                f"{len(self.units)} units stay in the memory of {self.here.device}, of which {free / 2**30:.1f} GiB "
                f"are left, {reserve / 2**30:.1f} GiB in reserve",
                file=sys.stderr,
            )


def _parts(unit: Unit, tiles: Sequence[Tile], state: dict) -> list[torch.Tensor]:
    """The state tensors of the unit's tiles."""
    values = [value for tile in tiles if tile.unit is unit for value in state.get(tile.master, {}).values()]
    return [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0]


def _bytes_of(unit: Unit, tiles: Sequence[Tile], state: dict) -> int:
    tensors = [unit.master, unit.grad, *_parts(unit, tiles, state)]
    shard = 0 if unit.shard is unit.master else unit.shard.nbytes
    return shard + sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _move(unit: Unit, tier: Tier, tiles: Sequence[Tile], state: dict) -> None:
    for value in _parts(unit, tiles, state):
        value.data = tier.keep(value.data)
    unit.move(tier)
    for tile in tiles:
        if tile.unit is unit:
            tile.master.data = unit.master[tile.start : tile.end]
