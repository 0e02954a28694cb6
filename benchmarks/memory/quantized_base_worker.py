"""A rank of `benchmarks.memory.quantized_base`: loads a model, trains LoRA on it, and reports.

It runs in this environment, or in one that has DeepSpeed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.launch import report

STEPS, ROWS, LENGTH = 3, 12, 32

# A step on a rank's part of the batch, which returns the loss.
Step = Callable[[torch.Tensor], torch.Tensor]


def load(folder: str, base: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if base == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
    elif base == "int8":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    torch.manual_seed(0)
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "down_proj"])
    return get_peft_model(model, lora, autocast_adapter_dtype=False).train()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(model), lr=1e-3, weight_decay=0.0)


def torch_step(model: Any, optimizer: Any, backward: Callable[[torch.Tensor], object]) -> Step:
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def ddp(folder: str, base: str) -> tuple[nn.Module, Step]:
    dist.init_process_group("gloo")
    model = load(folder, base)
    wrapped = nn.parallel.DistributedDataParallel(model)
    return model, torch_step(wrapped, adamw(model), torch.Tensor.backward)


def fsdp2(folder: str, base: str) -> tuple[nn.Module, Step]:
    """accelerate itself uses FSDP on accelerators only, so its function is called here."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    model = fsdp2_prepare_model(accelerator, load(folder, base))
    return model, torch_step(model, adamw(model), torch.Tensor.backward)


def config(**section: Any) -> dict[str, Any]:
    size = dist.get_world_size()
    return {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS // size,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **section},
    }


def initialized(package: Any, folder: str, base: str, **section: Any) -> tuple[nn.Module, Step]:
    """`package`: `zero` or the real `deepspeed`; both as under transformers' Trainer."""
    from transformers.integrations import HfDeepSpeedConfig

    settings = config(**section)
    integration = HfDeepSpeedConfig(settings)  # from_pretrained shards while it is alive
    model = load(folder, base)
    del integration
    engine = package.initialize(model=model, optimizer=adamw(model), config=settings)[0]

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss

    return model, step


def deepspeed(folder: str, base: str) -> tuple[nn.Module, Step]:
    import deepspeed as package

    package.init_distributed("gloo")
    return initialized(package, folder, base)


def ours(folder: str, base: str, **section: Any) -> tuple[nn.Module, Step]:
    import zero

    zero.comm.init_distributed(dist_backend="gloo")
    return initialized(zero, folder, base, **section)


ENGINES: dict[str, Callable[[str, str], tuple[nn.Module, Step]]] = {
    "DDP": ddp,
    "FSDP2 (accelerate)": fsdp2,
    "DeepSpeed": deepspeed,
    "zero": ours,
    "zero, base in host memory": lambda folder, base: ours(
        folder, base, offload_param={"device": "cpu"}
    ),
}


def held(model: nn.Module) -> int:
    """Bytes of the frozen weights that this rank holds, with what decodes them."""
    from zero.core.param_group import owning_group
    from zero.core.quantized_weights import reachable

    frozen = [param for param in model.parameters() if not param.requires_grad]
    groups = {owning_group(param) for param in frozen} - {None}
    if groups:
        return sum(group.shard.nbytes for group in groups)

    def parts() -> Iterator[torch.Tensor]:
        for param in frozen:
            # With zero imported, `param.ds_tensor` is what zero shows, not what DeepSpeed has set.
            sharded = vars(param).get("ds_tensor", getattr(param, "_local_tensor", None))
            yield param if sharded is None else sharded
            decoders = [getattr(param, key, None) for key in ("quant_state", "SCB")]
            yield from (tensor for _, tensor in reachable(decoders))
        for module in model.modules():  # bitsandbytes moves it there in the first forward
            scales = getattr(getattr(module, "state", None), "SCB", None)
            yield from () if scales is None else (scales,)

    memory = {part.untyped_storage().data_ptr(): part.nbytes for part in parts()}
    return sum(memory.values())


def of_this_process(fields: Iterable[str]) -> list[int]:
    """Fields of /proc/self/status, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(lines[field].split()[0]) << 10 for field in fields]


def main(folder: str, base: str, engine: str) -> None:
    if engine.startswith("zero"):
        import zero.hf

        zero.hf.enable()  # before transformers is imported
    import peft  # noqa: F401 (its memory is not the base's)
    import transformers  # noqa: F401

    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
    (before,) = of_this_process(["VmRSS"])
    model, step = ENGINES[engine](folder, base)
    rank, size = dist.get_rank(), dist.get_world_size()
    vocabulary = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    generator, loss, seconds = torch.Generator().manual_seed(0), torch.zeros(()), []
    for _ in range(STEPS):
        ids = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=generator)
        start = time.perf_counter()
        loss = step(ids.chunk(size)[rank])
        seconds.append(time.perf_counter() - start)
    (peak,) = of_this_process(["VmHWM"])
    tokens = ROWS * LENGTH / min(seconds[1:])
    report(
        {
            "held": held(model),
            "peak": peak - before,
            "tokens_per_second": tokens,
            "loss": loss.item(),
        }
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
