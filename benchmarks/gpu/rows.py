"""What `python -m benchmarks.gpu --all` measures, and the loop over it."""

from __future__ import annotations

import importlib.util
import sys
import time
from argparse import Namespace
from typing import NamedTuple

from benchmarks.runner import Row, cause, cell, finish, relative, run_job, table, write
from benchmarks.step.comparison import run

COLUMNS = {
    **{name: name for name in ("row", "variant", "model", "batch", "length")},
    "step s": "seconds",
    "/ first": "ratio",
    "tokens/s": "speed",
    "GPU GB": ("device", 1e9),
    "host GB": ("host", 1e9),
    **{name: name for name in ("issued", "first", "slices", "loss diff", "note")},
}
CAPTION = "One process on one GPU; ratios and losses are compared with a row's first variant"
LOSS_TOLERANCE = 2e-2  # see `TOLERANCES` of `benchmarks.gpu`


class Rows(NamedTuple):
    """Variants with the same `settings` of the worker. Each has its own process and `limit`
    seconds.

    variants: settings of one variant, by its name in the table, whose first word is the worker's.
    `most`: a factor of the memory that the first variant takes. `command`: of Python, in place of
    a training."""

    limit: float
    settings: Row
    variants: dict[str, Row]


def plain(*variants: str) -> dict[str, Row]:
    return {name: {} for name in variants}


SLICED = {"keys": {"activation_checkpointing": {"batch_slices": "auto", "cpu_checkpointing": True}}}
ADAPT = {"keys": {"on_out_of_memory": "adapt"}, "most": 0.7}
MICRO = {"micro_batches": 8, "checkpointing": True}
TESTS = {"command": ["-m", "pytest", "-q", "-m", "gpu", "tests/accelerator"]}

SHORT = {"model": "llama-1b", "batch": 4, "length": 2048, "warmup": 2, "steps": 3}
LONG = SHORT | {"batch": 32, "warmup": 1, "steps": 1}
T5 = SHORT | {"model": "t5-3b", "batch": 8, "length": 512}
QLORA = SHORT | {"model": "llama-4b", "length": 1024, "checkpointing": True, "quantized": True}
PEERS = {"fsdp2-offload": MICRO, "deepspeed3-offload": MICRO}
HOST = plain("zero3-offload", "fsdp2-offload", "deepspeed3-offload")
DEVICE = plain("ddp", "zero3", "fsdp2", "deepspeed3", "zero3-compiled", "ddp-compiled")
# A run may be cut, so what was never measured comes first.
ROWS = {
    "slices-64k": Rows(60, LONG, {"zero3-offload": SLICED, **PEERS}),
    "slices-128k": Rows(60, LONG | {"batch": 64}, {"zero3-offload": SLICED}),
    "t5-3b": Rows(75, T5, plain("zero3-offload", "fsdp2-offload")),
    "adapt": Rows(60, SHORT, {"zero3": {}, "zero3 adapt": ADAPT}),
    "qlora": Rows(60, QLORA, plain("plain", "zero3", "zero3-parameters")),
    "llama-8b": Rows(120, LONG | {"model": "llama-8b"}, {"zero3-offload-8bit": SLICED}),
    "device": Rows(75, SHORT | {"warmup": 3, "steps": 5}, DEVICE),
    "host": Rows(60, SHORT, HOST | {"zero3-offload slices": SLICED}),
    "files": Rows(90, LONG | {"batch": 4}, plain("zero3-files-behind")),
    "tests": Rows(150, {}, {"pytest": TESTS}),
}


def measured(rows: Rows, name: str, args: Namespace, seconds: float, first: Row | None) -> Row:
    """Return what a variant takes, or which library it lacks. Raises RuntimeError if it fails, or
    does not train as the first one.
    """
    own, settings = rows.variants[name], rows.settings
    if seconds <= 0:
        raise RuntimeError("not begun: the minutes are over")
    if "command" in own:
        return {"note": run_job(sys.executable, own["command"], 1, seconds).splitlines()[-1]}
    needed = ("bitsandbytes", "peft") if settings.get("quantized") else ()
    missing = [library for library in needed if importlib.util.find_spec(library) is None]
    if name.startswith("deepspeed") and not args.deepspeed_python:
        missing.append("--deepspeed-python")
    if missing:
        return {"note": f"left out: no {', '.join(missing)}"}
    if "most" in own:
        if first is None:
            raise RuntimeError("not begun: the memory of the first variant is not known")
        own = own | {"most": own["most"] * first["device"]}
    row = run(name.split()[0], args, seconds, one_batch=True, **settings | own)
    first = first or row
    row["speed"] = settings["batch"] * settings["length"] / row["seconds"]
    row["ratio"] = row["seconds"] / first["seconds"]
    row["loss diff"] = relative(row["losses"], first["losses"])
    # DeepSpeed rounds the weights before it copies them to its masters.
    if not row["loss diff"] <= LOSS_TOLERANCE and not name.startswith("deepspeed"):
        raise RuntimeError(f"not the same training: losses differ by {row['loss diff']:.1e}")
    return row


def measure(chosen: dict[str, Rows], args: Namespace) -> None:
    """Run the variants one after another, for `args.minutes` in all. What is known is printed and
    written after each. Exits with 1 if something failed, or if there was no time for it.
    """
    ends = time.monotonic() + 60 * args.minutes
    found: list[Row] = []
    failed: dict[str, str] = {}
    for title, rows in chosen.items():
        for name in rows.variants:
            row = {"row": title, "variant": name, **rows.settings}
            seconds, called = min(rows.limit, ends - time.monotonic()), f"{title}, {name}"
            first = next((r for r in found if r["row"] == title and "seconds" in r), None)
            try:
                row |= measured(rows, name, args, seconds, first)
            except RuntimeError as error:
                row["note"] = failed[called] = cause(str(error))
            found.append(row)
            print(f"{called}: {row.get('note') or cell(row['seconds'])}", flush=True)
            write(args, table(CAPTION, COLUMNS, found), missing=failed, rows=found)
    finish(args, table(CAPTION, COLUMNS, found), missing=failed, rows=found)
