"""Takes checkpoints from DeepSpeed to zero and back, and compares the losses after it with those of
runs that were not interrupted.

    python -m benchmarks.adopt --deepspeed-python PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED

T5 (with tied embeddings) and Llama, AdamW with two param groups and a warm-up. Three steps on two
ranks, then ten more: with the same engine, and with the other one on 1, 2 and 3 ranks. From
DeepSpeed at stages 1, 2 and 3 in fp32 and bf16; back at stage 3. Prints the largest relative
difference of the ten losses. A new environment compiles a part of DeepSpeed first, which takes
minutes.

With torch 2.6 or newer, DeepSpeed 0.15 can only load its own checkpoints with
TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1. At stage 3, it needs the command `numactl`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.adopt.worker import run_runs
from benchmarks.runner import Parser, Table, finish, ranks
from zero.conversion import deepspeed, ours

SAVED, STEPS, RANKS = 3, 13, 2
TOLERANCE = 1e-7
# In bf16, the engines add gradients in different dtypes.
TOLERANCES = {"fp32": TOLERANCE, "bf16": 2 * torch.finfo(torch.bfloat16).eps}


class Case(NamedTuple):
    model: str
    stage: int
    dtype: str

    @property
    def others(self) -> dict[str, Any]:
        return {} if self.dtype == "fp32" else {self.dtype: {"enabled": True}}


CASES = [
    Case(model, stage, dtype)
    for dtype in TOLERANCES
    for model in ("llama", "t5")
    for stage in (1, 2, 3)
]
BACK = [Case("llama", 3, "fp32"), Case("t5", 3, "fp32")]


def configuration(stage: int, **others: Any) -> dict[str, Any]:
    warmup = {"warmup_max_lr": 1e-2, "warmup_num_steps": 5, "warmup_type": "linear"}
    return {
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": warmup},
        **others,
    }


def run_all(
    python: str, package: str, runs: Sequence[dict[str, Any]], nproc: int
) -> list[list[float]]:
    """Run all with one engine on `nproc` ranks, and return the losses of each."""
    return ranks(run_runs, nproc, python=python, package=package, runs=runs)[0]


def start(model: str, stage: int, folder: Path, **others: Any) -> dict[str, Any]:
    """Return the settings of a run that saves, and goes on."""
    config = configuration(stage, **others)
    saved = {"save": str(folder), "save_at": SAVED}
    return {"model": model, "config": config, "first": 0, "last": STEPS, **saved}


def resume(model: str, stage: int, folder: Path, **others: Any) -> dict[str, Any]:
    config = configuration(stage, **others)
    steps = {"first": SAVED, "last": STEPS}
    return {"model": model, "config": config, "load": str(folder), **steps}


def difference(resumed: Sequence[float], whole: Sequence[float]) -> float:
    pairs = zip(resumed, whole[-len(resumed) :], strict=True)
    return max(abs(here - there) / abs(there) for here, there in pairs)


def compare(
    direction: str,
    engines: tuple[tuple[str, str], tuple[str, str]],
    cases: list[Case],
    folders: list[Path],
    handed_over: Callable[[Path, int], Path],
) -> list[dict[str, Any]]:
    """Run all cases with the first engine, which saves on the way, and go on with the second one on
    1, 2 and 3 ranks. Returns a row for each, and prints it.

    handed_over: a function of a checkpoint's folder and a number of ranks to the folder that the
    second engine loads."""
    saving, resuming = engines
    runs = [
        start(case.model, case.stage, folder, **case.others)
        for case, folder in zip(cases, folders, strict=True)
    ]
    whole = run_all(*saving, runs, RANKS)
    rows = []
    for number in (1, 2, 3):
        runs = [
            resume(case.model, case.stage, handed_over(folder, number), **case.others)
            for case, folder in zip(cases, folders, strict=True)
        ]
        found = run_all(*resuming, runs, number)
        for case, losses, expected in zip(cases, found, whole, strict=True):
            row = {"direction": direction, **case._asdict(), "ranks": number}
            row["difference"] = difference(losses, expected)
            row["equal"] = row["difference"] <= TOLERANCES[case.dtype]
            print(*row.values(), flush=True)
            rows.append(row)
    return rows


def main() -> None:
    parser = Parser(__doc__)
    parser.add_deepspeed(required=True)
    parser.add_output()
    args = parser.parse_args()
    theirs, own = (args.deepspeed_python, "deepspeed"), (sys.executable, "zero")

    def converted(folder: Path, number: int) -> Path:
        """Write a checkpoint of this engine as DeepSpeed's, of so many ranks."""
        state, out = ours.read(folder), folder.with_name(f"{folder.name}-{number}")
        state.ranks = number
        deepspeed.write(state, out)
        return out

    with tempfile.TemporaryDirectory() as work:
        folders = [Path(work, str(index)) for index, _ in enumerate(CASES)]
        rows = compare("from DeepSpeed", (theirs, own), CASES, folders, lambda folder, _: folder)
        folders = [Path(work, f"zero-{case.model}") for case in BACK]
        rows += compare("to DeepSpeed", (own, theirs), BACK, folders, converted)
    columns = list(rows[0])
    finish(args, Table("Losses", columns, [list(row.values()) for row in rows]))
    sys.exit(0 if all(row["equal"] for row in rows) else 1)


if __name__ == "__main__":
    main()
