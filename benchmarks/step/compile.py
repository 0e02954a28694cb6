"""Step time of a Llama (50M parameters), compiled block by block and eager: this engine's ZeRO-3
and FSDP2.

    python -m benchmarks.step.compile

All variants are in one process on each rank and take turns, step by step, so that a busy machine
disturbs all of them equally. A ratio is formed within a turn, and the median over the turns is
reported. The run fails if the losses of a variant differ from those of this engine in eager mode.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.arguments import Parser, result_file
from benchmarks.launch import REPOSITORY, report, run_ranks
from zero.tools.arguments import count

CLIP = 1.0
VOCABULARY = 16000
# Tolerance of fp32 losses with another order of sums, over all steps.
LOSS_TOLERANCE = 1e-4
VARIANTS = ["ours", "ours, compiled", "fsdp2", "fsdp2, compiled"]
# Ratios: numerator and denominator.
RATIOS = [
    ("ours, compiled", "ours"),
    ("fsdp2, compiled", "fsdp2"),
    ("ours, compiled", "fsdp2, compiled"),
]

TrainStep = Callable[[torch.Tensor], torch.Tensor]


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--processes", type=count, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=count, default=4, help="sequences per process and step")
    parser.add_argument("--length", type=count, default=64, help="tokens of each")
    parser.add_argument(
        "--warmup", type=int, default=2, help="turns that do not count; the first one compiles"
    )
    parser.add_argument("--steps", type=count, default=8, help="turns counted")
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "compile.json"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- one rank


def build() -> nn.Module:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=640, intermediate_size=1728, num_hidden_layers=8,
        num_attention_heads=10,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)


def ours(model: nn.Module, args: argparse.Namespace, compiled: bool) -> TrainStep:
    """Stage 3 with the default limits, and the engine's own `compile`."""
    import zero

    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 3},
        "compile": {"enabled": compiled},
    }
    engine, *_ = zero.initialize(model=model, optimizer=adamw(model), config=config)

    def train_step(tokens: torch.Tensor) -> torch.Tensor:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss

    return train_step


def fsdp2(model: nn.Module, args: argparse.Namespace, compiled: bool) -> TrainStep:
    """`fully_shard` on each layer and on the root.

    Layers are compiled in place, as accelerate does it.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
        if compiled:
            layer.compile()
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)

    def train_step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def measure(train_step: TrainStep, tokens: torch.Tensor) -> dict[str, float]:
    """Return wall and CPU seconds of one step of this process, and its loss."""
    dist.barrier()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    loss = train_step(tokens)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"loss": loss.item(), "wall": wall, "cpu": cpu}


def work(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    steps: dict[str, TrainStep] = {}
    for variant in VARIANTS:
        make = ours if variant.startswith("ours") else fsdp2
        model = build()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        steps[variant] = make(model, args, "compiled" in variant)
    generator, turns = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(args.warmup + args.steps):
        tokens = torch.randint(VOCABULARY, (args.batch, args.length), generator=generator)
        turns.append({variant: measure(step, tokens) for variant, step in steps.items()})
        turns[-1]["graphs"] = counters["stats"]["unique_graphs"]
    report({"parameters": parameters, "turns": turns})
    dist.destroy_process_group()


# -- all of them


def summary(ranks: list[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """Return medians over the counted turns and the ranks: seconds of each variant, and ratios
    within a turn.
    """
    turns = [turn for rank in ranks for turn in rank["turns"][warmup:]]
    seconds = {
        variant: {
            kind: statistics.median(turn[variant][kind] for turn in turns)
            for kind in ("wall", "cpu")
        }
        for variant in VARIANTS
    }
    ratios = {
        f"{top} / {bottom}": {
            kind: statistics.median(turn[top][kind] / turn[bottom][kind] for turn in turns)
            for kind in ("wall", "cpu")
        }
        for top, bottom in RATIOS
    }
    first = [turn for rank in ranks for turn in rank["turns"][:1]]
    compilation = {variant: max(turn[variant]["wall"] for turn in first) for variant in VARIANTS}
    return {
        "seconds": seconds,
        "ratios": ratios,
        "first step": compilation,
        "graphs": ranks[0]["turns"][-1]["graphs"],
    }


def check(ranks: list[dict[str, Any]], warmup: int) -> None:
    for rank in ranks:
        for turn in rank["turns"]:
            for variant in VARIANTS:
                difference = abs(turn[variant]["loss"] / turn["ours"]["loss"] - 1)
                if difference > LOSS_TOLERANCE:
                    sys.exit(
                        f"error: {variant}'s loss differs by {difference:.1e}: it does not compute "
                        "the same training"
                    )
        if rank["turns"][-1]["graphs"] != rank["turns"][warmup - 1]["graphs"]:
            sys.exit("error: graphs were compiled in counted steps")


def main() -> None:
    args = parse_arguments()
    if args.worker:
        return work(args)
    results = {}
    options = [
        text
        for name in ("batch", "length", "warmup", "steps")
        for text in (f"--{name}", str(vars(args)[name]))
    ]
    for processes in args.processes:
        ranks = run_ranks(
            sys.executable, ["-m", "benchmarks.step.compile", "--worker", *options], processes, 1800
        )
        check(ranks, args.warmup)
        results[processes] = summary(ranks, args.warmup)
        load = os.getloadavg()[0]
        print(
            f"\n{processes} process(es) of one thread, {ranks[0]['parameters'] / 1e6:.1f}M "
            f"parameters, load {load:.1f}"
        )
        for variant, row in results[processes]["seconds"].items():
            first = results[processes]["first step"][variant]
            print(
                f"  {variant:<34} wall {row['wall']:.3f} s  cpu {row['cpu']:.3f} s  first step "
                f"{first:.1f} s"
            )
        for name, row in results[processes]["ratios"].items():
            print(f"  {name:<34} wall {row['wall']:.2f}    cpu {row['cpu']:.2f}")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    settings = {
        name: value for name, value in vars(args).items() if name not in ("output", "worker")
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(
        json.dumps({"settings": settings, "versions": versions, "results": results}, indent=2)
    )
    print(f"\nwritten: {args.output}")


if __name__ == "__main__":
    main()
