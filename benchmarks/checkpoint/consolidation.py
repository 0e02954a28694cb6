"""Builds a whole T5 of 1.0e9 parameters in `zero.Init`, and saves it from its shards: memory and
seconds, on the ranks and from a checkpoint.

    python -m benchmarks.checkpoint.consolidation
    python -m benchmarks.checkpoint.consolidation --folder FOLDER_WITH_10_GB

Two ranks build the model as a Trainer script with ZeRO-3 does, and save it as
`engine.save_16bit_model` and as `Trainer.save_model` do. The table shows the largest anonymous
memory of each rank beyond its shards; while the model is built, beyond what there was before.
Limits are the shards and 1 GiB while it is built, and then two groups. Then `python -m zero
consolidate` consolidates a checkpoint of the weights (fp32, no optimizer state), in a process that
may use 0.9 GiB of address space beyond its imports (torch built for CUDA maps several GiB of
libraries). The exit code is 1 if a limit is exceeded."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.runner import REPOSITORY, Parser, existing_folder, finish, ranks, table

GIB = 2**30
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
COLUMNS = {
    "way": "way",
    "rank": "rank",
    "s": "seconds",
    "extra MB": ("memory", 1e6),
    "limit MB": ("limit", 1e6),
}


def consolidate_within_limit(checkpoint: Path, out: Path, limit: int = LIMIT) -> float:
    """Return the seconds of the command in a process that may take `limit` bytes of address space
    beyond its imports.
    """
    arguments = ["consolidate", str(checkpoint), str(out), "--dtype", "bf16"]
    command = [sys.executable, "-c", LIMITED, str(limit), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    process = subprocess.run(command, cwd=REPOSITORY, env=env, timeout=600)
    if process.returncode:
        sys.exit(f"error: exit code {process.returncode}: zero {' '.join(arguments)}")
    return time.perf_counter() - start


def build_and_save(folder: str, model: str) -> dict[str, Any]:
    """On a rank: build the model, and save it in each way."""
    import zero.hf

    zero.hf.enable()  # before transformers is imported
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForSeq2SeqLM
    from transformers.integrations import HfDeepSpeedConfig

    from benchmarks.measuring import PeakMemory
    from benchmarks.models import MODELS

    section = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": section}
    zero.comm.init_distributed(dist_backend="gloo")
    ways: list[dict[str, Any]] = []

    def measure(name: str, act: Callable[[], Any]) -> Any:
        dist.barrier()
        with PeakMemory() as memory:
            start = time.perf_counter()
            result = act()
            dist.barrier()
            seconds = time.perf_counter() - start
        ways.append({"way": name, "seconds": seconds, "memory": memory.extra})
        return result

    # transformers builds models inside zero.Init while this object is alive.
    ds_config = HfDeepSpeedConfig(config)
    built = measure("zero.Init", lambda: AutoModelForSeq2SeqLM.from_config(MODELS[model]()))
    del ds_config
    engine = zero.initialize(model=built, config=config)[0]

    def as_the_trainer_does() -> None:
        """Accelerator.get_state_dict, then `save_pretrained` on rank 0."""
        state = engine._zero3_consolidated_16bit_state_dict()
        if state is not None:
            built.save_pretrained(Path(folder, "trainer"), state_dict=state)

    to = Path(folder)
    measure("save_checkpoint, weights only", lambda: engine.save_checkpoint(to / "checkpoint"))
    measure("save_16bit_model", lambda: engine.save_16bit_model(to / "engine"))
    bf16 = {"save_dtype": torch.bfloat16}
    measure("save_16bit_model, bf16", lambda: engine.save_16bit_model(to / "16", **bf16))
    measure("Trainer.save_model", as_the_trainer_does)
    two_groups = 2 * 4 * max(group.layout.padded for group in engine.groups)
    parameters = built.num_parameters()
    shards = 4 * parameters // dist.get_world_size()
    limits = [shards + GIB] + [two_groups] * (len(ways) - 1)
    rank = {"rank": dist.get_rank()}
    rows = [row | rank | {"limit": most} for row, most in zip(ways, limits, strict=True)]
    return {"parameters": parameters, "rows": rows}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--model", choices=("t5-1b", "t5-250m", "t5-42m"), default="t5-1b")
    parser.add_argument("--folder", type=existing_folder, help="to write to; default: temporary")
    parser.add_output()
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = ranks(build_and_save, 2, timeout=900, folder=folder, model=args.model)
        offline = consolidate_within_limit(Path(folder) / "checkpoint", Path(folder) / "offline")
        files = Path(folder, "offline").glob("*.safetensors")
        nbytes = sum(path.stat().st_size for path in files)
    parameters = found[0]["parameters"]
    rows = [row for way in zip(*(rank["rows"] for rank in found), strict=True) for row in way]
    caption = (
        f"T5 of {parameters / 1e9:.3f}e9 parameters, fp32, 2 ranks; python -m zero consolidate: "
        f"{nbytes / 1e9:.2f} GB in {offline:.0f} s within {LIMIT / GIB:.1f} GiB beyond the imports"
    )
    finish(args, table(caption, COLUMNS, rows), rows=rows, offline_seconds=offline, limit=LIMIT)
    within = all(row["memory"] <= row["limit"] for row in rows)
    sys.exit(0 if within and nbytes > 2 * parameters else 1)


if __name__ == "__main__":
    main()
