"""One rank of one engine of the parity run: 20 steps with `initialize`, `backward` and `step`.
Reports the curve.

`benchmarks.compatibility.deepspeed_losses` starts it on each rank in each environment. Only the
name of the package differs."""

from __future__ import annotations

import argparse
import importlib
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.launch import report
from benchmarks.models import build_t5, synthetic_batches

VOCABULARY = 256
T5 = {
    "d_model": 64,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 16,
    "vocab_size": VOCABULARY,
}
BATCH, SOURCE_LENGTH, TARGET_LENGTH = 4, 12, 9


def build_gpt2(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id = config.eos_token_id = 0
    return GPT2LMHeadModel(config)


def forward(model: nn.Module, engine: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(model, GPT2LMHeadModel):
        return engine(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
    return engine(**batch).loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", choices=["zero", "deepspeed"], required=True)
    parser.add_argument("--model", choices=["t5", "gpt2"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--accumulation", type=int, required=True)
    args = parser.parse_args()

    package = importlib.import_module(args.package)
    package.comm.init_distributed(dist_backend="gloo")
    model = build_t5(T5, seed=3) if args.model == "t5" else build_gpt2(seed=3)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 2e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.01},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 2e-3,
                "warmup_num_steps": 5,
                "warmup_type": "linear",
            },
        },
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
    }
    engine, *_ = package.initialize(model=model, model_parameters=model.parameters(), config=config)
    batches = synthetic_batches(
        VOCABULARY, BATCH, SOURCE_LENGTH, TARGET_LENGTH, seed=dist.get_rank()
    )
    curve = []
    for _ in range(args.steps):
        losses = []
        for batch in islice(batches, args.accumulation):
            loss = forward(model, engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        curve.append(
            {"loss": sum(losses) / len(losses), "grad_norm": float(engine.get_global_grad_norm())}
        )
    report({"curve": curve})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
