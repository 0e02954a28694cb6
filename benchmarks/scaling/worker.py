"""One process of `python -m benchmarks.scaling --check`: the median seconds of a step of a small
Llama at stage 3.

"step" is the whole step, "update" the part in `engine.step()`, including the wait for other ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers

import zero
from benchmarks.launch import report

WARMUP, STEPS = 2, 3
_KEYS = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {
        "stage": 3,
        "stage3_prefetch_bucket_size": 1000000,
        "stage3_param_persistence_threshold": 1000,
    },
}
BATCH, LENGTH = 1, 64


def keys(section: dict[str, Any]) -> dict[str, Any]:
    """The configuration, with these changes in its section `zero_optimization`."""
    return _KEYS | {"zero_optimization": _KEYS["zero_optimization"] | section}


def shape() -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=2048,
        architectures=["LlamaForCausalLM"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--zero", type=json.loads, default={}, help="changes of zero_optimization, as JSON"
    )
    config = keys(parser.parse_args().zero)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    engine = zero.initialize(model=transformers.LlamaForCausalLM(shape()), config=config)[0]
    ids = torch.randint(0, 2048, (BATCH, LENGTH))
    steps, updates = [], []
    for _ in range(WARMUP + STEPS):
        begin = time.perf_counter()
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        computed = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - begin)
        updates.append(time.perf_counter() - computed)
    report(
        {"step": statistics.median(steps[WARMUP:]), "update": statistics.median(updates[WARMUP:])}
    )


if __name__ == "__main__":
    main()
