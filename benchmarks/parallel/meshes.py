"""Measures step times of this engine and of torch's own parts on data, tensor and pipeline meshes.

    python -m benchmarks.parallel.meshes

Both train the same Llama (4.2M parameters) on the same batches: this engine, and FSDP2 composed
with torch's `parallelize_module` or with `torch.distributed.pipelining`. They take turns, so that a
busy machine disturbs both equally. A ratio is formed within a round, and the median over the rounds
is reported. The run fails if losses differ.

At stage 3 this engine reduces gradients with each micro-batch of a pipeline, and reshards after
each. FSDP2 does both once, with the last one, and keeps whole gradients until then."""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks.parallel.meshes_worker import measure
from benchmarks.runner import Parser, Row, finish, ranks, summary, table, take_turns
from zero.tools.arguments import count

# (pipeline, shard, tensor) and the stage. FSDP2's counterpart of stage 1 keeps weights until
# backward.
CASES = [
    ((1, 1, 2), 3),
    ((1, 2, 2), 3),
    ((2, 1, 1), 3),
    ((2, 1, 1), 1),
    ((2, 2, 1), 3),
    ((2, 2, 1), 1),
]
VARIANTS = ["fsdp2", "zero"]
LOSS_TOLERANCE = 1e-5  # relative
KEYS = ("cpu", "seconds")
COLUMNS = {
    "data x tensor x pipeline": "mesh",
    "stage": "stage",
    "variant": "variant",
    "CPU s": "cpu",
    "wall s": "seconds",
    "CPU / FSDP2": "cpu ratio",
    "wall / FSDP2": "seconds ratio",
    "loss diff": "loss diff",
}


def run(variant: str, mesh: tuple[int, int, int], stage: int, task: dict[str, int]) -> Row:
    """The medians over ranks, and each step's loss: the mean over the ranks that end a pipeline."""
    nproc, job = mesh[0] * mesh[1] * mesh[2], {"mesh": mesh, "stage": stage}
    found = ranks(measure, nproc, timeout=600, variant=variant, **job, **task)
    ends = [rank["losses"] for rank in found if rank["pipeline_end"]]
    row = {key: statistics.median(rank[key] for rank in found) for key in KEYS}
    return row | {"losses": [statistics.mean(step) for step in zip(*ends, strict=True)]}


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--batch", type=count, default=8, help="rows per data rank and step")
    add("--length", type=count, default=64, help="tokens of a row")
    add("--rounds", type=count, default=3)
    add("--warmup", type=int, default=2, help="steps that do not count, per round")
    add("--steps", type=count, default=6, help="counted steps, per round")
    parser.add_output()
    args = parser.parse_args()
    task = {name: getattr(args, name) for name in ("batch", "length", "warmup", "steps")}
    rows, missing = [], {}
    for mesh, stage in CASES:
        job = partial(run, mesh=mesh, stage=stage, task=task)
        rounds, failed = take_turns(VARIANTS, args.rounds, job)
        _, found = summary(rounds, VARIANTS, failed, {"loss diff": LOSS_TOLERANCE}, KEYS)
        shape = " x ".join(str(mesh[axis]) for axis in (1, 2, 0))
        missing |= {f"{shape}, stage {stage}, {name}": why for name, why in failed.items()}
        for name, row in found.items():
            rows.append(row | {"mesh": shape, "stage": stage, "variant": name})
    finish(args, table("A step and process", COLUMNS, rows), missing=missing, rows=rows)


if __name__ == "__main__":
    main()
