"""Measures what the frozen base of an adapter takes on each rank, by base and engine: bytes of its
weights, peak host memory since before the model was loaded, and tokens per second.

    python -m benchmarks.memory.quantized_base
    python -m benchmarks.memory.quantized_base --deepspeed-python PATH_OF_A_PYTHON_WITH_DEEPSPEED

A Llama with LoRA, on CPUs, loaded by `from_pretrained` in bf16 or quantized by bitsandbytes. The
bytes are those of all frozen weights, with the scales and codebooks that decode them. In addition,
a rank holds the adapter's optimizer state. Tokens per second are those of the fastest step."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from benchmarks.arguments import Parser, result_file
from benchmarks.launch import REPOSITORY, run_ranks
from benchmarks.memory.quantized_base_worker import ENGINES
from zero.tools.arguments import count

BASES = ("bf16", "nf4", "int8")


def save_model(folder: str, width: int, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def measure(folder: str, base: str, engine: str, args: Any) -> list[dict[str, Any]] | str:
    """The reports of the ranks, or why there are none."""
    python, env = sys.executable, {"ACCELERATE_USE_CPU": "true"}
    if engine == "DeepSpeed":
        if args.deepspeed_python is None:
            return "not installed"
        python, env = args.deepspeed_python, {**env, "DS_ACCELERATOR": "cpu"}
    command = ["-m", "benchmarks.memory.quantized_base_worker", folder, base, engine]
    try:
        return run_ranks(python, command, args.processes, 600, env)
    except RuntimeError as error:
        if engine.startswith("zero"):
            raise
        return f"fails: {str(error).strip().splitlines()[-1]}"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--processes", type=count, default=2)
    parser.add_argument("--width", type=count, default=1024)
    parser.add_argument("--layers", type=count, default=4)
    parser.add_argument(
        "--deepspeed-python",
        metavar="PYTHON",
        help="interpreter of an environment that has deepspeed",
    )
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks/out/quantized_base.json"
    )
    args = parser.parse_args()
    folder = str(args.output.parent / "quantized_base")
    save_model(folder, args.width, args.layers)
    results = {}
    print(
        f"{args.processes} processes; bytes and peak of the rank that takes most\n\n"
        "| base | engine | bytes of the base on a rank | peak of host memory | tokens/s | loss |\n"
        "|---|---|---|---|---|---|"
    )
    for base in BASES:
        for engine in ENGINES:
            results[f"{base}, {engine}"] = ranks = measure(folder, base, engine, args)
            cells = f"{ranks} | | | |"
            if not isinstance(ranks, str):
                loss = sum(rank["loss"] for rank in ranks) / len(ranks)
                largest = {key: max(rank[key] for rank in ranks) for key in ("held", "peak")}
                speed = min(rank["tokens_per_second"] for rank in ranks)
                cells = f"{largest['held']:,} | {largest['peak'] / 1e6:,.0f} MB | {speed:,.0f} | "
                cells += f"{loss:.5f} |"
            print(f"| {base} | {engine} | {cells}", flush=True)
    args.output.write_text(json.dumps(results, indent=2))
    print(f"\nwritten: {args.output}")


if __name__ == "__main__":
    main()
