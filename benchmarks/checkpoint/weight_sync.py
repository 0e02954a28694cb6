"""Measures the time and memory of giving every rank all weights of a T5 of 1.0e9 parameters, as an
inference engine needs them.

    python -m benchmarks.checkpoint.weight_sync
    python -m benchmarks.checkpoint.weight_sync --deepspeed-python PYTHON_WITH_DEEPSPEED

bf16, stage 3, two ranks. `a parameter at a time` and `all at once` use `GatheredParameters`, of
this engine and of DeepSpeed. Only this engine has `stream_weights`. Seconds are medians over the
rounds. `extra MB` is the largest anonymous memory of a rank beyond its shards. `gathers` counts
this engine's collectives."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measuring import PeakMemory
from benchmarks.models import MODELS, build
from benchmarks.runner import Parser, environment, finish, ranks, table
from zero.tools.arguments import count

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
Weights = Iterator[tuple[str, torch.Tensor]]
COLUMNS = {
    "engine": "engine",
    "way": "way",
    "s": "seconds",
    "extra MB": ("memory", 1e6),
    "gathers": "gathers",
}


def measure(pass_over: Callable[[], Weights], rounds: int) -> dict[str, float]:
    seconds, memory = [], 0
    for _ in range(rounds):
        dist.barrier()
        with PeakMemory() as peak:
            start = time.perf_counter()
            for _, value in pass_over():
                assert value.numel() and value.data_ptr()
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        memory = max(memory, peak.extra)
    return {"seconds": statistics.median(seconds), "memory": memory}


def sync(engine: str, model: str, rounds: int) -> dict[str, Any]:
    """On a rank, with `zero` or with `deepspeed`: measure each way."""
    package = importlib.import_module(engine)
    package.comm.init_distributed(dist_backend="gloo")
    names = package.zero if engine == "deepspeed" else package
    with names.Init(config_dict_or_path=CONFIG):
        built = build(model)
    made = package.initialize(model=built, config=CONFIG)[0]

    def one_by_one() -> Weights:
        for key, param in built.named_parameters():
            with names.GatheredParameters([param]):
                yield key, param.data

    def all_at_once() -> Weights:
        with names.GatheredParameters(list(built.parameters())):
            for key, param in built.named_parameters():
                yield key, param.data

    ways: dict[str, Callable[[], Weights]] = {
        "a parameter at a time": one_by_one,
        "all at once": all_at_once,
    }
    if engine == "zero":
        for megabytes in (64, 512):
            ways[f"stream_weights, {megabytes} MB"] = partial(
                package.stream_weights, made, max_bytes=megabytes * 10**6
            )
    rows = []
    for way, pass_over in ways.items():
        calls = dict(made.comm.calls) if engine == "zero" else {}
        rows.append({"engine": engine, "way": way} | measure(pass_over, rounds))
        if engine == "zero":
            kinds = ("all_gather", "broadcast")
            done = sum(made.comm.calls[kind] - calls.get(kind, 0) for kind in kinds)
            rows[-1]["gathers"] = done // rounds
    numel = sum(getattr(param, "ds_numel", param.numel()) for param in built.parameters())
    return {"parameters": numel, "rows": rows}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="t5-1b")
    parser.add_argument("--processes", type=count, default=2)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_deepspeed()
    parser.add_output()
    args = parser.parse_args()
    rows, parameters = [], 0
    for engine in ["zero", *(["deepspeed"] if args.deepspeed_python else [])]:
        env, task = environment(engine, args), {"model": args.model, "rounds": args.rounds}
        found = ranks(sync, args.processes, timeout=1500, engine=engine, **env, **task)[0]
        parameters, rows = found["parameters"], rows + found["rows"]
    caption = f"T5 of {parameters / 1e9:.3f}e9 parameters, bf16, {args.processes} ranks"
    finish(args, table(caption, COLUMNS, rows), rows=rows)


if __name__ == "__main__":
    main()
