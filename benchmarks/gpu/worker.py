"""One rank of one variant of the GPU benchmark: trains a model on random tokens, and reports time
and memory of a step.

`benchmarks.gpu` starts it on each rank, in this environment or (variants `deepspeed...`) in one
that has DeepSpeed. A variant is a function from a plain model in fp32 to `train_step(batch) ->
loss`. All compute in bf16, keep fp32 masters and moments of AdamW, and clip gradients to a global
norm of 1.0."""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    PretrainedConfig,
    T5Config,
)

from benchmarks.launch import report

LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "use_cache": False,
}
T5 = {"vocab_size": 32128, "dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}
# Shapes of Llama-3.2-1B (1.24 billion parameters), Llama-3.1-8B (8.03 billion) and T5-3B (2.85
# billion).
MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama-tiny": lambda: LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, **LLAMA
    ),
    "llama-1b": lambda: LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        tie_word_embeddings=True,
        **LLAMA,
    ),
    "llama-8b": lambda: LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, **LLAMA
    ),
    "t5-3b": lambda: T5Config(
        d_model=1024, d_ff=16384, d_kv=128, num_heads=32, num_layers=24, **T5
    ),
}
BLOCKS = ("LlamaDecoderLayer", "T5Block")
CLIP, SEED = 1.0, 1
# A small rate: one batch is repeated, and a steep fall of the loss would enlarge differences of
# rounding.
ADAMW = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}

Batch = dict[str, torch.Tensor]
TrainStep = Callable[[Batch], torch.Tensor]


def device() -> torch.device:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def auto(config: PretrainedConfig) -> type:
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def build(name: str, checkpointing: bool) -> nn.Module:
    """Build a model with random fp32 weights on the device. All variants get the same values."""
    torch.manual_seed(SEED)
    config = MODELS[name]()
    with device():
        model = auto(config).from_config(config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def batch_of(config: PretrainedConfig, args: argparse.Namespace) -> Batch:
    """Return random tokens (batch, length) as inputs and labels."""
    generator = torch.Generator().manual_seed(SEED + dist.get_rank())
    tokens = torch.randint(2, config.vocab_size, (args.batch, args.length), generator=generator).to(
        device()
    )
    return {"input_ids": tokens, "labels": tokens}


# -- the variants


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)


def by_torch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: nn.Module,
    autocast: bool = False,
) -> TrainStep:
    def train_step(batch: Batch) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def ddp(model: nn.Module, args: argparse.Namespace) -> TrainStep:
    """DistributedDataParallel with autocast over fp32 parameters."""
    dist.init_process_group("nccl")
    wrapped = nn.parallel.DistributedDataParallel(
        model, device_ids=[device().index], gradient_as_bucket_view=True
    )
    return by_torch(wrapped, adamw(wrapped), wrapped, autocast=True)


def fsdp2(
    model: nn.Module,
    args: argparse.Namespace,
    offload: bool = False,
    reduce_dtype: torch.dtype = torch.float32,
) -> TrainStep:
    """`fully_shard` on each block and on the root, by default with torchtitan's dtypes."""
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    dist.init_process_group("cpu:gloo,cuda:nccl")
    policies = {
        "mesh": dist.init_device_mesh("cuda", (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    for module in [module for module in model.modules() if type(module).__name__ in BLOCKS]:
        fully_shard(module, **policies)
    fully_shard(model, **policies)
    return by_torch(model, adamw(model), model)


def engine(
    package: str, stage: int, **sections: Any
) -> Callable[[nn.Module, argparse.Namespace], TrainStep]:
    """Return a variant of an engine with DeepSpeed's interface.

    `package`: `zero` or the real `deepspeed`.
    """

    def variant(model: nn.Module, args: argparse.Namespace) -> TrainStep:
        library = __import__(package)
        config = {
            "train_micro_batch_size_per_gpu": args.batch,
            "gradient_clipping": CLIP,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, **sections},
            # torch's fused AdamW is not in DeepSpeed's list of tested optimizers.
            "zero_allow_untested_optimizer": True,
        }
        library.comm.init_distributed(dist_backend="nccl")
        if "offload_optimizer" in sections:
            config["optimizer"] = {"type": "AdamW", "params": ADAMW}
            made, *_ = library.initialize(
                model=model, model_parameters=model.parameters(), config=config
            )
        else:
            made, *_ = library.initialize(model=model, optimizer=adamw(model), config=config)

        def train_step(batch: Batch) -> torch.Tensor:
            loss = made(**batch).loss
            made.backward(loss)
            made.step()
            return loss

        train_step.clock = getattr(getattr(made, "comm", None), "clock", None)
        return train_step

    return variant


HOST = {"device": "cpu", "pin_memory": True}
OPTIMIZER, BOTH = {"offload_optimizer": HOST}, {"offload_optimizer": HOST, "offload_param": HOST}
VARIANTS: dict[str, Callable[[nn.Module, argparse.Namespace], TrainStep]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2-bf16-reduce": partial(
        fsdp2, reduce_dtype=torch.bfloat16
    ),  # as the engines of DeepSpeed's kind do
    **{f"zero{stage}": engine("zero", stage) for stage in (1, 2, 3)},
    **{f"deepspeed{stage}": engine("deepspeed", stage) for stage in (1, 2, 3)},
    "fsdp2-offload": partial(fsdp2, offload=True),
    "zero2-optimizer": engine("zero", 2, **OPTIMIZER),
    "zero3-optimizer": engine("zero", 3, **OPTIMIZER),
    "zero3-offload": engine("zero", 3, **BOTH),
    "zero3-offload-8bit": engine("zero", 3, **BOTH, zero_quantized_moments=True),
    "deepspeed2-optimizer": engine("deepspeed", 2, **OPTIMIZER),
    "deepspeed3-optimizer": engine("deepspeed", 3, **OPTIMIZER),
    "deepspeed3-offload": engine("deepspeed", 3, **BOTH),
}


# -- measurements


def flops(name: str, batch: int, length: int) -> float:
    """Return the operations of a forward and backward pass, counted as in PaLM (appendix B),
    without recomputation.

    Six for each weight of a linear layer and token, and 12 x width x length for each attention and
    token."""
    with torch.device("meta"):
        modules = list(auto(MODELS[name]()).from_config(MODELS[name]()).modules())
    weights = sum(module.weight.numel() for module in modules if isinstance(module, nn.Linear))
    widths = [m.q_proj.out_features for m in modules if hasattr(m, "q_proj")]
    widths += [m.q.out_features for m in modules if hasattr(m, "q")]
    return batch * length * (6.0 * weights + 12.0 * sum(widths) * length)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train.

    The counted steps are waited for only at their end, as in a training run that does not log each
    loss.
    """
    model = build(args.model, args.checkpointing)
    config, parameters = model.config, sum(parameter.numel() for parameter in model.parameters())
    train_step = VARIANTS[args.variant](model, args)
    batch = batch_of(config, args)
    losses = [train_step(batch).detach() for _ in range(args.warmup)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if clock := getattr(train_step, "clock", None):
        clock.reset()
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(args.steps):
        losses.append(train_step(batch).detach())
    returned = time.perf_counter() - start
    torch.cuda.synchronize()
    return {
        "parameters": parameters,
        "losses": [loss.item() for loss in losses],
        "seconds": (time.perf_counter() - start) / args.steps,
        "issued": returned / args.steps,
        "cpu": (time.process_time() - cpu) / args.steps,
        "device": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "phases": {name: spent / args.steps for name, spent in clock.phases.items()}
        if clock
        else {},
        "waits": {": ".join(name): spent / args.steps for name, spent in clock.waits.items()}
        if clock
        else {},
        "name": torch.cuda.get_device_name(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--checkpointing", action="store_true")
    for name in ("batch", "length", "warmup", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    torch.cuda.set_device(device())
    report(measure(args))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
