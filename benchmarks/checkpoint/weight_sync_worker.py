"""One rank of `benchmarks.checkpoint.weight_sync`, with `zero` or with `deepspeed` in its own
environment.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from transformers import T5ForConditionalGeneration

from benchmarks.checkpoint.worker import PeakMemory
from benchmarks.launch import report
from benchmarks.models import T5_1B, t5_config

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}

Weights = Iterator[tuple[str, torch.Tensor]]


def measure(
    pass_over: Callable[[], Weights], rounds: int, count: Callable[[], int]
) -> dict[str, float]:
    seconds, memory, before = [], 0, count()
    for _ in range(rounds):
        dist.barrier()
        with PeakMemory() as peak:
            start = time.perf_counter()
            for _, value in pass_over():
                assert value.numel() and value.data_ptr()
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        memory = max(memory, peak.extra)
    return {
        "seconds": statistics.median(seconds),
        "memory": memory,
        "gathers": (count() - before) // rounds,
    }


def main() -> None:
    name, rounds = sys.argv[1], int(sys.argv[2])
    package = importlib.import_module(name)
    package.comm.init_distributed(dist_backend="gloo")
    gathered = (
        package.zero.GatheredParameters if name == "deepspeed" else package.GatheredParameters
    )
    init = package.zero.Init if name == "deepspeed" else package.Init
    with init(config_dict_or_path=CONFIG):
        model = T5ForConditionalGeneration(t5_config(T5_1B))
    engine = package.initialize(model=model, config=CONFIG)[0]

    def one_by_one() -> Weights:
        for key, param in model.named_parameters():
            with gathered([param]):
                yield key, param.data

    def all_at_once() -> Weights:
        with gathered(list(model.parameters())):
            for key, param in model.named_parameters():
                yield key, param.data

    ways: dict[str, Callable[[], Weights]] = {
        "a parameter at a time": one_by_one,
        "all at once": all_at_once,
    }
    if name == "zero":
        for megabytes in (64, 512):
            ways[f"stream_weights, {megabytes} MB"] = lambda m=megabytes: package.stream_weights(
                engine, max_bytes=m * 10**6
            )

    def count() -> int:
        return (
            engine.comm.calls["all_gather"] + engine.comm.calls["broadcast"]
            if name == "zero"
            else 0
        )

    measured = {way: measure(pass_over, rounds, count) for way, pass_over in ways.items()}
    numel = sum(getattr(param, "ds_numel", param.numel()) for param in model.parameters())
    report({"parameters": numel, "ways": measured})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
