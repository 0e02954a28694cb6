"""Saves a whole T5 of 1.0e9 parameters from its shards: memory and seconds, on the ranks and from a
checkpoint.

    python -m benchmarks.checkpoint.consolidation
    python -m benchmarks.checkpoint.consolidation --folder FOLDER_WITH_10_GB

Two ranks build the model in `zero.Init`, and save it as `engine.save_16bit_model` and as
`Trainer.save_model` do. The table shows the largest anonymous memory of each rank beyond its
shards. The limit is two groups. Then `python -m zero consolidate` consolidates a checkpoint of the
weights (fp32, no optimizer state), in a process that may use 0.9 GiB of address space beyond its
imports (torch built for CUDA maps several GiB of libraries). The exit code is 1 if a limit is
exceeded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.arguments import Parser, existing_folder, result_file
from benchmarks.launch import REPOSITORY, run_ranks

GIB = 2**30
MODELS = ("t5-1b", "t5-250m", "t5-42m")
# Of address space beyond the imports, in bytes.
LIMIT = 9 * GIB // 10
# The command `zero` with its arguments, under the limit that is the first argument.
LIMITED = """
import resource, sys
from pathlib import Path
from zero.tools import consolidate  # with torch, whose libraries may map several GiB
from zero.tools.cli import main

pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
main(sys.argv[2:])
"""


def consolidate_within_limit(checkpoint: Path, out: Path, limit: int = LIMIT) -> float:
    """Return the seconds of the command in a process that may take `limit` bytes of address space
    beyond its imports.
    """
    arguments = ["consolidate", str(checkpoint), str(out), "--dtype", "bf16"]
    command = [sys.executable, "-c", LIMITED, str(limit), *arguments]
    start = time.perf_counter()
    process = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    if process.returncode:
        sys.exit(f"error: exit code {process.returncode}: zero {' '.join(arguments)}")
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
        f"\npython -m zero consolidate: {nbytes / 1e9:.2f} GB in {offline:.0f} s within "
        f"{LIMIT / GIB:.1f} GiB of address space beyond the imports"
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
