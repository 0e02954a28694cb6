"""Bytes of a quantized base on each rank, and the mean loss after a few steps of LoRA, by base and
engine: DistributedDataParallel, zero, and zero with the base in host memory.

    python -m benchmarks.memory.quantized_base

The model is a Llama of 2 layers of width 512, on CPUs. Each base is quantized by its library. The
bytes are those of the packed weights, their scales and codebooks, without embeddings, norms and
adapters."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero
from benchmarks.arguments import Parser, result_file
from benchmarks.launch import REPOSITORY, report, run_ranks
from zero.core.quantized_weights import quantized_tensors
from zero.tools.arguments import count

BASES = ("nf4", "nf4 nested", "int8", "torchao int8")
ENGINES: dict[str, dict[str, Any] | None] = {
    "DDP": None,
    "zero": {},
    "zero, base in host memory": {"offload_param": {"device": "cpu"}},
}
STEPS, ROWS, LENGTH, VOCABULARY = 3, 12, 32, 512


def quantization(base: str) -> Any:
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if base == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if base == "torchao int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    nested = "nested" in base
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested
    )


def save_model(folder: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def build(folder: str, base: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization(base), dtype=torch.float32
    )
    torch.manual_seed(0)
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "down_proj"])
    return get_peft_model(model, lora).train()


def base_bytes(model: nn.Module) -> int:
    found = (each.tensor for module in model.modules() for each in quantized_tensors(module))
    return sum(tensor.numel() * tensor.element_size() for tensor in found)


def work(folder: str, base: str, engine_name: str) -> None:
    """One rank: train, then report."""
    zero.comm.init_distributed()
    model, section = build(folder, base), ENGINES[engine_name]
    params = [param for param in model.parameters() if param.requires_grad]
    rank, size = dist.get_rank(), dist.get_world_size()
    held = base_bytes(model)
    if section is None:
        # All ranks have loaded the same; DDP cannot broadcast torchao's tensors.
        engine: Any = nn.parallel.DistributedDataParallel(model, init_sync=False)
        optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.0)
    else:
        config = {
            "train_batch_size": ROWS,
            "train_micro_batch_size_per_gpu": ROWS // size,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3, **section},
        }
        engine = zero.initialize(model=model, model_parameters=params, config=config)[0]
        held = sum(group.shard.nbytes for group in engine.groups if group.packed)
    generator, loss = torch.Generator().manual_seed(0), torch.zeros(())
    for _ in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
        part = ids.chunk(size)[rank]
        loss = engine(input_ids=part, labels=part).loss
        if section is None:
            loss.backward()
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(loss)
            engine.step()
    report({"held": held, "loss": loss.item()})


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--processes", type=count, default=2)
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks/out/quantized_base.json"
    )
    args = parser.parse_args()
    folder = str(args.output.parent / "quantized_base")
    save_model(folder)
    results = {}
    print(
        f"{args.processes} processes\n\n| base | engine | bytes of the base on a rank | mean loss |"
    )
    print("|---|---|---|---|")
    for base in BASES:
        for engine in ENGINES:
            command = ["-m", "benchmarks.memory.quantized_base_worker", folder, base, engine]
            ranks = run_ranks(
                sys.executable, command, args.processes, timeout=300, env={**os.environ}
            )
            loss = sum(rank["loss"] for rank in ranks) / len(ranks)
            results[f"{base}, {engine}"] = ranks
            print(f"| {base} | {engine} | {ranks[0]['held']:,} | {loss:.7f} |", flush=True)
    args.output.write_text(json.dumps(results, indent=2))
    print(f"\nwritten: {args.output}")


if __name__ == "__main__":
    main()
