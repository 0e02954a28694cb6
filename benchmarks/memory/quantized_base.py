"""Measures what the frozen base of an adapter takes on each rank, by base and engine: bytes of its
weights, peak host memory since before the model was loaded, and tokens per second.

    python -m benchmarks.memory.quantized_base
    python -m benchmarks.memory.quantized_base --deepspeed-python PATH_OF_A_PYTHON_WITH_DEEPSPEED

A Llama with LoRA, on CPUs, loaded by `from_pretrained` in bf16 or quantized by bitsandbytes. The
bytes are those of all frozen weights, with the scales and codebooks that decode them. In addition,
a rank holds the adapter's optimizer state. Tokens per second are those of the fastest step."""

from __future__ import annotations

import importlib
import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measuring import forget_peaks, of_this_process
from benchmarks.runner import Parser, Row, cause, environment, finish, ranks, table
from zero.tools.arguments import count

BASES = ("bf16", "nf4", "int8")
COLUMNS = {
    "base": "base",
    "engine": "engine",
    "base on a rank, MB": ("held", 1e6),
    "peak MB": ("peak", 1e6),
    "tokens/s": "speed",
    "loss": "loss",
    "fails": "fails",
}
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


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trainable = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trainable, lr=1e-3, weight_decay=0.0)


def torch_step(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def ddp(folder: str, base: str) -> tuple[nn.Module, Step]:
    dist.init_process_group("gloo")
    model = load(folder, base)
    wrapped = nn.parallel.DistributedDataParallel(model)
    return model, torch_step(wrapped, adamw(model))


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
    return model, torch_step(model, adamw(model))


def by(package: str, folder: str, base: str, **section: Any) -> tuple[nn.Module, Step]:
    """`zero` or the real `deepspeed`, both as under transformers' Trainer."""
    from transformers.integrations import HfDeepSpeedConfig

    library = importlib.import_module(package)
    library.comm.init_distributed(dist_backend="gloo")
    settings = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **section},
    }
    integration = HfDeepSpeedConfig(settings)  # from_pretrained shards while it is alive
    model = load(folder, base)
    del integration
    engine = library.initialize(model=model, optimizer=adamw(model), config=settings)[0]

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss

    return model, step


ENGINES: dict[str, Callable[[str, str], tuple[nn.Module, Step]]] = {
    "DDP": ddp,
    "FSDP2 (accelerate)": fsdp2,
    "DeepSpeed": partial(by, "deepspeed"),
    "zero": partial(by, "zero"),
    "zero, base in host memory": partial(by, "zero", offload_param={"device": "cpu"}),
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


def work(folder: str, base: str, engine: str) -> Row:
    """On a rank, in this environment or in one that has DeepSpeed: load, train and report."""
    if engine.startswith("zero"):
        import zero.hf

        zero.hf.enable()  # before transformers is imported
    import peft  # noqa: F401 (its memory is not the base's)
    import transformers  # noqa: F401

    forget_peaks()
    before = of_this_process()["VmRSS"]
    model, step = ENGINES[engine](folder, base)
    rank, size = dist.get_rank(), dist.get_world_size()
    vocabulary = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    generator, loss, seconds = torch.Generator().manual_seed(0), torch.zeros(()), []
    for _ in range(STEPS):
        ids = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=generator)
        start = time.perf_counter()
        loss = step(ids.chunk(size)[rank])
        seconds.append(time.perf_counter() - start)
    peak, speed = of_this_process()["VmHWM"] - before, ROWS * LENGTH / min(seconds[1:])
    return {"held": held(model), "peak": peak, "speed": speed, "loss": loss.item()}


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


def measure(folder: str, base: str, engine: str, args: Namespace) -> Row:
    """The largest rank's memory, the slowest one's speed and the mean loss, or why there are
    none.
    """
    there = environment(engine, args)
    there["env"] = {**there.get("env", {}), "ACCELERATE_USE_CPU": "true"}
    task = {"folder": folder, "base": base, "engine": engine}
    try:
        found = ranks(work, args.processes, timeout=600, **there, **task)
    except RuntimeError as error:
        if engine.startswith("zero"):
            raise
        return {"fails": cause(str(error))}
    row: Row = {key: max(rank[key] for rank in found) for key in ("held", "peak")}
    row["loss"] = f"{sum(rank['loss'] for rank in found) / len(found):.5f}"
    return row | {"speed": min(rank["speed"] for rank in found)}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--processes", type=count, default=2)
    parser.add_argument("--width", type=count, default=1024)
    parser.add_argument("--layers", type=count, default=4)
    parser.add_deepspeed()
    parser.add_output()
    args = parser.parse_args()
    folder = str(args.output.parent / "quantized_base")
    save_model(folder, args.width, args.layers)
    engines = [name for name in ENGINES if args.deepspeed_python or name != "DeepSpeed"]
    rows = [
        {"base": base, "engine": engine} | measure(folder, base, engine, args)
        for base, engine in product(BASES, engines)
    ]
    caption = f"{args.processes} processes; bytes and peak of the rank that takes most"
    finish(args, table(caption, COLUMNS, rows), rows=rows)


if __name__ == "__main__":
    main()
