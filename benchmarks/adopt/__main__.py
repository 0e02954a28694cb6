"""Goes from DeepSpeed to zero and back in the middle of runs, and compares losses with those of
runs that were not interrupted.

    python -m benchmarks.adopt --deepspeed-python PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED

T5 (with tied embeddings) and Llama in fp32, AdamW with two param groups and a warm-up. Three steps
on two ranks, then ten more: with the same engine, and with the other one on 1, 2 and 3 ranks.
Prints the largest relative difference of the ten losses. A new environment compiles a part of
DeepSpeed first, which takes minutes."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import Parser, interpreter, result_file
from benchmarks.launch import REPOSITORY, run_ranks
from zero.conversion import deepspeed, ours

SAVED, STEPS, RANKS = 3, 13, 2
TOLERANCE = 1e-7
# The models, with DeepSpeed's stage of each.
MODELS = {"llama": 3, "t5": 3}
MORE = {"llama": 2, "t5": 1}


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


def resume(model: str, stage: int, folder: Path) -> dict[str, Any]:
    config = configuration(stage)
    return {
        "model": model,
        "config": config,
        "first": SAVED,
        "last": STEPS,
        "load": str(folder),
    }


def difference(resumed: Sequence[float], whole: Sequence[float]) -> float:
    pairs = zip(resumed, whole[-len(resumed) :], strict=True)
    return max(abs(here - there) / abs(there) for here, there in pairs)


def compare(python: str, work: Path) -> list[dict[str, Any]]:
    """Return a row for each direction, model, stage and number of ranks, and print it."""
    rows: list[dict[str, Any]] = []

    def add(direction: str, names: Sequence[tuple[str, int]], ranks: int, found: Any, whole: Any):
        for (model, stage), here, there in zip(names, found, whole, strict=True):
            largest = difference(here, there)
            row = {"direction": direction, "model": model, "stage": stage, "ranks": ranks}
            rows.append(row | {"difference": largest, "losses": here, "uninterrupted": there})
            mark = "" if largest <= TOLERANCE else f"  more than {TOLERANCE:.0e}"
            print(f"{direction:<22}  {model:<6}  {stage:>5}  {ranks:>5}  {largest:8.1e}{mark}")

    names = [*MODELS.items(), *MORE.items()]
    folders = [work / f"{model}-{stage}" for model, stage in names]
    started = [start(*name, folder) for name, folder in zip(names, folders, strict=True)]
    whole = run_all(python, "deepspeed", started, RANKS)
    for ranks in (1, 2, 3):
        resumed = [resume(*name, folder) for name, folder in zip(names, folders, strict=True)]
        add(
            "DeepSpeed to zero",
            names,
            ranks,
            run_all(sys.executable, "zero", resumed, ranks),
            whole,
        )

    names = list(MODELS.items())
    folders = [work / f"zero-{model}" for model, _ in names]
    started = [start(*name, folder) for name, folder in zip(names, folders, strict=True)]
    whole = run_all(sys.executable, "zero", started, RANKS)
    for ranks in (1, 2, 3):
        written = [work / f"back-{model}-{ranks}" for model, _ in names]
        for folder, out in zip(folders, written, strict=True):
            state = ours.read(folder)
            state.ranks = ranks
            deepspeed.write(state, out)
        resumed = [resume(*name, folder) for name, folder in zip(names, written, strict=True)]
        add("zero to DeepSpeed", names, ranks, run_all(python, "deepspeed", resumed, ranks), whole)
    return rows


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
    print(f"{'direction':<22}  {'model':<6}  {'stage':>5}  {'ranks':>5}  {'loss diff':>8}")
    with tempfile.TemporaryDirectory() as work:
        rows = compare(args.deepspeed_python, Path(work))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(rows, indent=2))
    print(f"written: {args.output}")
    sys.exit(0 if all(row["difference"] <= TOLERANCE for row in rows) else 1)


if __name__ == "__main__":
    main()
