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

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.arguments import Parser, interpreter, result_file
from benchmarks.launch import REPOSITORY, run_ranks
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
    command = ["-m", "benchmarks.adopt.worker", "--package", package, "--runs", json.dumps(runs)]
    return run_ranks(python, command, nproc, timeout=1800)[0]["losses"]


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


class Comparison:
    """Runs both directions.

    Attributes:
        theirs, ours: the interpreter of each engine, and the name of its package.
        rows: what was found for each direction, case and number of ranks.
    """

    def __init__(self, python: str, work: Path):
        self.theirs, self.work = (python, "deepspeed"), work
        self.ours = sys.executable, "zero"
        self.rows: list[dict[str, Any]] = []

    def from_deepspeed(self) -> None:
        folders = [self.work / f"{index}" for index, _ in enumerate(CASES)]
        whole = self._run_whole(self.theirs, CASES, folders)
        for ranks in (1, 2, 3):
            self._go_on("from DeepSpeed", self.ours, CASES, folders, ranks, whole)

    def to_deepspeed(self) -> None:
        folders = [self.work / f"zero-{case.model}" for case in BACK]
        whole = self._run_whole(self.ours, BACK, folders)
        for ranks in (1, 2, 3):
            written = [self.work / f"back-{case.model}-{ranks}" for case in BACK]
            for folder, out in zip(folders, written, strict=True):
                state = ours.read(folder)
                state.ranks = ranks
                deepspeed.write(state, out)
            self._go_on("to DeepSpeed", self.theirs, BACK, written, ranks, whole)

    def _run_whole(
        self, engine: tuple[str, str], cases: list[Case], folders: list[Path]
    ) -> dict[Case, list[float]]:
        """Run without interruption, and save on the way."""
        pairs = zip(cases, folders, strict=True)
        runs = [start(case.model, case.stage, folder, **case.others) for case, folder in pairs]
        return dict(zip(cases, run_all(*engine, runs, RANKS), strict=True))

    def _go_on(
        self,
        direction: str,
        engine: tuple[str, str],
        cases: list[Case],
        folders: list[Path],
        ranks: int,
        whole: dict[Case, list[float]],
    ) -> None:
        """Resume on so many ranks, and print the difference from the losses of whole runs."""
        pairs = zip(cases, folders, strict=True)
        runs = [resume(case.model, case.stage, folder, **case.others) for case, folder in pairs]
        for case, losses in zip(cases, run_all(*engine, runs, ranks), strict=True):
            expected, allowed = whole[case], TOLERANCES[case.dtype]
            largest = difference(losses, expected)
            equal = largest <= allowed
            found = f"{largest:8.1e}" + ("" if equal else f"  more than {allowed:.0e}")
            lists = {"losses": losses, "uninterrupted": expected}
            self._add(direction, case, ranks, found, equal=equal, difference=largest, **lists)

    def _add(
        self, direction: str, case: Case, ranks: int, found: str, equal: bool = False, **others: Any
    ) -> None:
        row = {"direction": direction, **case._asdict(), "ranks": ranks}
        print(_LINE.format(*row.values(), found), flush=True)
        self.rows.append(row | {"equal": equal, **others})


_LINE = "{:<14}  {:<6}  {:>5}  {:<5}  {:>5}  {}"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--deepspeed-python",
        type=interpreter,
        required=True,
        help="interpreter of an environment that has deepspeed",
    )
    parser.add_argument(
        "--output",
        type=result_file,
        default=REPOSITORY / "benchmarks" / "out" / "adopt.json",
    )
    args = parser.parse_args()
    print(_LINE.format("direction", "model", "stage", "dtype", "ranks", "loss diff"))
    with tempfile.TemporaryDirectory() as work:
        comparison = Comparison(args.deepspeed_python, Path(work))
        comparison.from_deepspeed()
        comparison.to_deepspeed()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(comparison.rows, indent=2))
    print(f"written: {args.output}")
    sys.exit(0 if all(row["equal"] for row in comparison.rows) else 1)


if __name__ == "__main__":
    main()
