"""Counts what the engine launches, copies, waits for and allocates in a step, on the simulated
accelerator.

An operation is the engine's if the innermost Python frame outside of torch is in a file of `zero/`,
except `engine.py`, which runs the model. Operations that make views or allocate memory launch
nothing."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zero
from tests.accelerator import device
from tests.dist.training import ds_config, start, step
from tests.parity.test_mixed_precision import SECTIONS
from tests.processes import run_on
from zero.comm import traffic
from zero.comm.traffic import IN, NETWORK, OUT
from zero.config import load_config
from zero.offload import pinned, tiers
from zero.tools.estimate.question import Question
from zero.tools.estimate.rank import estimate

ENGINE = Path(zero.__file__).parent
TORCH = str(Path(torch.__file__).parent)
BLOCKS, WIDTH, ROWS = 3, 32, 4
# Each block is a group, and is resharded between forward and backward.
EVERY_UNIT = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
NO_KERNEL = tuple(
    f"aten.{name}"
    for name in ("empty", "set_", "resize_", "detach", "lift_fresh", "_local_scalar_dense")
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """Every group is a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Counting(TorchDispatchMode):
    """Counts the engine's operations by name: all of them in `kernels`, those that the host waits
    for in `syncs`.

    `copied`: bytes between host and device, by file and by the kind of device that they go to.
    """

    waiting = ("aten._local_scalar_dense",)

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.copied: Counter[tuple[str, str]] = Counter()
        self.host_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        place, name = self._place(), str(func).rpartition(".")[0]
        if place is None:
            return out
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in [*tensors, *results]}
        if name in self.waiting and device.NAME in devices:
            self.syncs[f"{place}: {name}"] += 1
        if name in ("aten._to_copy", "aten.copy_") and len(devices) == 2:
            self.copied[place.partition(":")[0], out.device.type] += out.nbytes
            if not _is_asynchronous(func, args, kwargs):
                self.syncs[f"{place}: {name}"] += 1
        if device.NAME in devices and not func.is_view and not name.startswith(NO_KERNEL):
            self.kernels[name] += 1
        if name.startswith("aten.empty"):
            self.host_bytes += sum(each.nbytes for each in results if each.device.type == "cpu")
        return out

    def _place(self) -> str | None:
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
        if frame is None:  # autograd's own thread
            return None
        return self.name_of(Path(frame.f_code.co_filename), frame.f_code.co_name)

    def name_of(self, file: Path, function: str) -> str | None:
        """The name of a place, if it counts."""
        # The control plane has a hundred bytes of each rank.
        ours = ENGINE in file.parents and file.name not in ("engine.py", "control.py")
        return f"{file.relative_to(ENGINE)}:{function}" if ours else None


def _is_asynchronous(func: Any, args: tuple, kwargs: dict | None) -> bool:
    names = [each.name for each in func._schema.arguments]
    return bool((dict(zip(names, args, strict=False)) | (kwargs or {})).get("non_blocking"))


@dataclass
class Counts:
    """What the engine does in one step: kernels by phase, waits, copies, blocks and bytes of new
    host memory.

    `syncs`: by place, those that torch shows. `waits`: all of them, as the device counts. `moved`:
    by link, as the engine counts. `shard_numel`: of all groups."""

    shard_numel: int
    waits: int
    kernels: dict[str, Counter[str]]
    syncs: Counter[str]
    copied: Counter[tuple[str, str]]
    moved: Counter[str]
    blocks: int
    host_bytes: int


def fifth_step(rank: int, world_size: int, sections: dict[str, Any]) -> Counts:
    """Count the fifth step: after backwards 1, 2, 4, 8, ... the ranks also agree on the order of
    reductions.
    """
    torch.manual_seed(0)
    engine, _ = start(Model().to(device.NAME), ds_config(**EVERY_UNIT, **sections))
    dtype = next(engine.module.parameters()).dtype
    batch = {"x": torch.randn(ROWS, WIDTH, device=device.NAME, dtype=dtype)}
    for _ in range(4):
        step(engine, [batch])
    new_block = mock.Mock(side_effect=pinned.new_block)
    patched = mock.patch.object(tiers, "new_block", new_block)
    with mock.patch.object(pinned, "new_block", new_block), patched:
        waits, moved = device.waits(), Counter(traffic.MOVED)
        with Counting() as forward:
            loss = engine(**batch)
        with Counting() as backward:
            engine.backward(loss)
        with Counting() as update:
            engine.step()
        waits = device.waits() - waits
    phases = {"forward": forward, "backward": backward, "step": update}
    assert device.mistakes() == []
    return Counts(
        sum(group.layout.shard_numel for group in engine.groups),
        waits,
        {name: phase.kernels for name, phase in phases.items()},
        sum((phase.syncs for phase in phases.values()), Counter()),
        sum((phase.copied for phase in phases.values()), Counter()),
        traffic.MOVED - moved,
        new_block.call_count,
        sum(phase.host_bytes for phase in phases.values()),
    )


# Each block is gathered in forward and again in backward. The last block is gathered once: its
# backward comes at once.
GATHER = {"c10d._allgather_base_": 2 * BLOCKS - 1}
# `_foreach_zero_` clears the padding at the end of the flat buffer.
COPY_IN = {"aten._foreach_copy_": BLOCKS, "aten._foreach_zero_": BLOCKS}
REDUCE = {"c10d._reduce_scatter_base_": BLOCKS}
# The one wait of the host in a step.
NORM = {"optim/sharded_optimizer.py:_global_norm: aten._local_scalar_dense": 1}


KEPT_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    ("sections", "copy_out"),
    [
        ({}, {}),
        ({"reduce_bucket_size": WIDTH * WIDTH}, {}),
        (SECTIONS[torch.bfloat16], {}),
        (SECTIONS[torch.bfloat16] | KEPT_IN_FP32, {"aten.copy_": BLOCKS}),
    ],
    ids=["fp32", "a bucket smaller than a block", "bf16", "bf16 kept in fp32"],
)
def test_a_block_has_three_collectives_and_two_copies(sections, copy_out):
    """The collective writes the gradient to its place.

    Widening a 16-bit one takes one more kernel.
    """
    for found in run_on(2, fifth_step, sections, simulated=True):
        # Not compared phase by phase: the forward already starts gathers for the backward.
        kernels = found.kernels["forward"] + found.kernels["backward"]
        assert kernels == GATHER | COPY_IN | REDUCE | copy_out
        assert found.kernels["step"]["aten._foreach_norm"] == 1
        assert (found.syncs, found.waits) == (NORM, 1)


HOST = {"offload_optimizer": {"device": "cpu", "overlap_step": False}}


@pytest.mark.parametrize(
    "sections",
    [
        HOST,
        HOST | SECTIONS[torch.bfloat16],
        HOST | SECTIONS[torch.bfloat16] | {"offload_param": {"device": "cpu"}},
    ],
    ids=["optimizer", "optimizer, bf16", "both, bf16"],
)
def test_offload_allocates_no_host_memory_after_the_first_steps_and_blocks_for_the_norm_only(
    sections,
):
    """It also waits for events of copies, while it updates tiles. These are not counted."""
    for found in run_on(2, fifth_step, sections, simulated=True):
        assert (found.blocks, found.host_bytes) == (0, 0)
        assert found.syncs == NORM
        # Each weight goes to the device once, after its update or for each gather, and each
        # gradient to the host.
        weight = 2 if "bf16" in sections else 4
        gathers = (2 * BLOCKS - 1) / BLOCKS if "offload_param" in sections else 1
        copied = Counter()
        for (file, where), nbytes in found.copied.items():
            copied[where] += nbytes * (file != "optim/sharded_optimizer.py")
        assert copied == {
            device.NAME: gathers * weight * found.shard_numel,
            "cpu": weight * found.shard_numel,
        }
        config = load_config(ds_config(**EVERY_UNIT, **sections))
        predicted = estimate(Model(), config, Question(2)).traffic.links
        assert copied == {device.NAME: predicted[IN].total(), "cpu": predicted[OUT].total()}
        assert found.moved == {link: predicted[link].total() for link in (IN, OUT, NETWORK)}


def with_files(rank: int, world_size: int, folder: str) -> Counts:
    tiers.LEAST_BYTES_IN_A_FILE = 1
    away = {"device": "nvme", "nvme_path": folder}
    files = {"offload_param": away | {"max_in_cpu": 0}}
    files["offload_optimizer"] = away | {"overlap_step": False}
    return fifth_step(rank, world_size, files)


@pytest.mark.parametrize("ranks", [1, 2])
def test_files_do_not_block_the_host_in_copies(tmp_path, ranks):
    """Weights and gradients move between files and the device through pinned buffers, beside the
    computation.
    """
    for found in run_on(ranks, with_files, str(tmp_path), simulated=True):
        assert (found.blocks, found.host_bytes) == (0, 0)
        assert found.syncs == NORM, "the host waits for the norm only"
