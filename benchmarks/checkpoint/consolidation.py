"""Saving a whole T5 of 1.0e9 parameters from its shards: memory and seconds, on the ranks and from
a checkpoint.

    python -m benchmarks.checkpoint.consolidation
    python -m benchmarks.checkpoint.consolidation --folder FOLDER_WITH_10_GB

Two ranks build the model in `zero.Init`, and save it as `engine.save_16bit_model` and as
`Trainer.save_model` do. The table shows the largest anonymous memory of each rank beyond its
shards. The limit is two groups. Then `python -m zero consolidate` consolidates a checkpoint of the
weights (fp32, no optimizer state), in a process with an address space of 1.5 GiB. The exit code is
1 if a limit is passed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.arguments import Parser, existing_folder, result_file
from benchmarks.launch import REPOSITORY, run_ranks

GIB = 2**30
MODELS = ("t5-1b", "t5-250m", "t5-42m")
LIMIT = 3 * GIB // 2


def consolidate_within_limit(checkpoint: Path, out: Path) -> float:
    """Return the seconds of the command in a process with an address space of `LIMIT`."""
    command = [
        sys.executable,
        "-m",
        "zero",
        "consolidate",
        str(checkpoint),
        str(out),
        "--dtype",
        "bf16",
    ]
    start = time.perf_counter()
    process = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT)),
        timeout=600,
    )
    if process.returncode:
        sys.exit(f"error: exit code {process.returncode}: {' '.join(command)}")
    return time.perf_counter() - start


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="t5-1b")
    parser.add_argument(
        "--folder",
        type=existing_folder,
        help="folder to write to; default: the folder of temporary files",
    )
    parser.add_argument(
        "--output",
        type=result_file,
        default=REPOSITORY / "benchmarks" / "out" / "consolidation.json",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        ranks = run_ranks(
            sys.executable,
            ["-m", "benchmarks.checkpoint.consolidation_worker", folder, args.model],
            2,
            timeout=900,
        )
        offline = consolidate_within_limit(Path(folder) / "checkpoint", Path(folder) / "offline")
        nbytes = sum(
            path.stat().st_size for path in (Path(folder) / "offline").glob("*.safetensors")
        )
    limit = ranks[0]["two_units"]
    print(
        f"\nT5 of {ranks[0]['parameters'] / 1e9:.3f}e9 parameters, fp32; two groups are "
        f"{limit / 1e6:.0f} MB\n"
    )
    print(f"{'':<34}{'rank':>5}{'seconds':>9}{'extra MB':>10}")
    for name in ranks[0]["ways"]:
        for number, rank in enumerate(ranks):
            way = rank["ways"][name]
            print(f"{name:<34}{number:>5}{way['seconds']:>9.1f}{way['memory'] / 1e6:>10.0f}")
    print(
        f"\npython -m zero consolidate: {nbytes / 1e9:.2f} GB in {offline:.0f} s within an address "
        "space of "
        f"{LIMIT / GIB:.1f} GiB"
    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(
        json.dumps({"ranks": ranks, "offline_seconds": offline, "limit": LIMIT}, indent=2)
    )
    print(f"\nwritten: {args.output}")
    within = all(way["memory"] <= limit for rank in ranks for way in rank["ways"].values())
    sys.exit(0 if within and nbytes > 2 * ranks[0]["parameters"] else 1)


if __name__ == "__main__":
    main()
