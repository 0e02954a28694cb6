"""One rank of one variant of a training: `benchmarks.step`, `benchmarks.gpu` and
`benchmarks.offload` call `train`.

A variant is a system with its settings. All train the same random model on the same tokens with
AdamW, and clip gradients to a global norm of 1.0. In bf16, DDP and plain torch use autocast over
fp32 parameters, and the others bf16 parameters with fp32 masters."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice, pairwise, repeat
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measuring import forget_peaks, of_this_process, timed
from benchmarks.models import BLOCKS, build, synthetic_batches
from benchmarks.runner import medians
from zero.device import CPU, accelerator, use

CLIP = 1.0
# A small rate: where one batch is repeated, a steep fall of the loss would enlarge differences of
# rounding.
ADAMW = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
Batch = dict[str, torch.Tensor]
TrainStep = Callable[[Batch], torch.Tensor]


class Variant(NamedTuple):
    """`system`: plain, ddp, fsdp2, zero or deepspeed. `section`: the engine's `zero_optimization`,
    or what FSDP2 is given.
    """

    system: str
    section: dict[str, Any] = {}
    compiled: bool = False


HOST, FILES, HALF = {"device": "cpu"}, {"device": "nvme"}, {"device": "cpu", "ratio": 0.5}
OPTIMIZER, BOTH = {"offload_optimizer": HOST}, {"offload_optimizer": HOST, "offload_param": HOST}
# Every group is resharded after each use, in forward and in backward.
STRICT = {"stage": 3, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
# With the default limit the whole model would stay in host memory.
IN_FILES = {"stage": 3, "sub_group_size": 50_000_000, "offload_param": FILES | {"max_in_cpu": 0}}
WITHIN = FILES | {"overlap_step": False}
PIPELINED = FILES | {"pipeline_read": True, "pipeline_write": True}
BEHIND = PIPELINED | {"overlap_step": True}
CODED = {"zero_quantized_moments": True}
# DeepSpeed's. With fewer buffers, assertions in it fail. One must take the largest weight.
ITS_FILES = {"sub_group_size": 10_000_000, "offload_optimizer": PIPELINED | {"buffer_count": 24}}
ITS_FILES["offload_param"] = IN_FILES["offload_param"] | {"buffer_count": 24, "buffer_size": 4e7}

VARIANTS = {
    "plain": Variant("plain"),
    "ddp": Variant("ddp"),
    "fsdp2": Variant("fsdp2"),
    # As the engines of DeepSpeed's kind reduce.
    "fsdp2-bf16-reduce": Variant("fsdp2", {"reduce_dtype": torch.bfloat16}),
    "fsdp2-compiled": Variant("fsdp2", compiled=True),
    "fsdp2-offload": Variant("fsdp2", {"offload": True}),
    "ddp-compiled": Variant("ddp", compiled=True),
    **{f"zero{stage}": Variant("zero", {"stage": stage}) for stage in range(4)},
    "zero3-strict": Variant("zero", STRICT),
    "zero3-compiled": Variant("zero", {"stage": 3}, compiled=True),
    "zero2-optimizer": Variant("zero", {"stage": 2} | OPTIMIZER),
    "zero3-optimizer": Variant("zero", {"stage": 3} | OPTIMIZER),
    "zero3-parameters": Variant("zero", {"stage": 3, "offload_param": HOST}),
    "zero3-offload": Variant("zero", {"stage": 3} | BOTH),
    "zero3-offload-8bit": Variant("zero", {"stage": 3} | BOTH | CODED),
    "zero3-offload-half": Variant("zero", {"stage": 3} | BOTH | {"offload_optimizer": HALF}),
    "zero3-files": Variant("zero", IN_FILES | {"offload_optimizer": WITHIN}),
    "zero3-files-behind": Variant("zero", IN_FILES | {"offload_optimizer": BEHIND}),
    "zero3-files-8bit": Variant("zero", IN_FILES | CODED | {"offload_optimizer": BEHIND}),
    **{f"deepspeed{stage}": Variant("deepspeed", {"stage": stage}) for stage in (1, 2, 3)},
    "deepspeed3-strict": Variant("deepspeed", STRICT),
    "deepspeed2-optimizer": Variant("deepspeed", {"stage": 2} | OPTIMIZER),
    "deepspeed3-optimizer": Variant("deepspeed", {"stage": 3} | OPTIMIZER),
    "deepspeed3-offload": Variant("deepspeed", {"stage": 3} | BOTH),
    "deepspeed3-files": Variant("deepspeed", IN_FILES | STRICT | ITS_FILES),
}


def device() -> torch.device:
    return accelerator(int(os.environ["LOCAL_RANK"])) or CPU


def init_process_group() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def micro_batches(batch: Batch, number: int) -> list[Batch]:
    chunks = {name: value.chunk(number) for name, value in batch.items()}
    return [{name: chunk[i] for name, chunk in chunks.items()} for i in range(number)]


def by_torch(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 1, autocast: bool = False
) -> TrainStep:
    """Return a step in torch, with gradients of `number` micro-batches."""

    def train_step(batch: Batch) -> torch.Tensor:
        losses = []
        for part in micro_batches(batch, number):
            with torch.autocast(device().type, torch.bfloat16, enabled=autocast):
                loss = model(**part).loss
            (loss / number).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return train_step


def by_engine(engine: Any, number: int = 1) -> TrainStep:
    """Return a step of an engine with DeepSpeed's interface."""

    def train_step(batch: Batch) -> torch.Tensor:
        losses = []
        for part in micro_batches(batch, number):
            loss = engine(**part).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return train_step


def shard_by_torch(
    model: nn.Module,
    bf16: bool = False,
    reduce_dtype: torch.dtype = torch.float32,
    offload: bool = False,
    compiled: bool = False,
    reshard_after_forward: bool = True,
) -> None:
    """`fully_shard` on each block and on the root, with torchtitan's dtypes. Blocks are compiled in
    place, as accelerate does it. Without a GPU nothing is offloaded.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    init_process_group()
    policies: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    policies["mesh"] = dist.init_device_mesh(device().type, (dist.get_world_size(),))
    if bf16:
        policies["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    offloads = offload and torch.accelerator.is_available()
    policies["offload_policy"] = CPUOffloadPolicy() if offloads else OffloadPolicy()
    for module in blocks_of(model):
        fully_shard(module, **policies)
        if compiled:
            module.compile()
    fully_shard(model, **policies)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in BLOCKS]


def section_of(variant: str, folder: str) -> dict[str, Any]:
    """Return `zero_optimization` of a variant whose files are in `folder`."""
    section = dict(VARIANTS[variant].section)
    for key in ("offload_param", "offload_optimizer"):
        if key in section:
            pinned = {"pin_memory": torch.accelerator.is_available()}
            section[key] = section[key] | pinned | {"nvme_path": folder}
    return section


def initialize(package: str, model: nn.Module, config: dict[str, Any]) -> Any:
    """Return the engine of `zero` or of the real `deepspeed`, with torch's fused AdamW, or with the
    engine's own where the optimizer is offloaded.
    """
    library = importlib.import_module(package)
    library.comm.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    if "offload_optimizer" in config["zero_optimization"]:
        config = config | {"optimizer": {"type": "AdamW", "params": ADAMW}}
        params = model.parameters()
        return library.initialize(model=model, model_parameters=params, config=config)[0]
    # torch's fused AdamW is not in DeepSpeed's list of tested optimizers.
    config = config | {"zero_allow_untested_optimizer": True}
    return library.initialize(model=model, optimizer=adamw(model), config=config)[0]


def adamw(model: nn.Module, **changed: Any) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, **ADAMW | changed, fused=True)


def with_adapters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the model with the linear layers of its blocks in NF4, and PEFT's LoRA on them."""
    from peft import LoraConfig, get_peft_model

    quantized: Any = importlib.import_module("bitsandbytes.nn")
    model.to(dtype)
    model.is_loaded_in_4bit = True  # where it is not, PEFT would wrap the layers as common ones
    for owner in [module for block in blocks_of(model) for module in block.modules()]:
        for name, linear in list(owner.named_children()):
            if isinstance(linear, nn.Linear):
                shape = linear.in_features, linear.out_features
                layer = quantized.Linear4bit(*shape, False, dtype, quant_type="nf4", device="meta")
                weight = quantized.Params4bit(linear.weight.data, quant_type="nf4")
                layer.weight = weight.to(device())
                setattr(owner, name, layer)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))


def prepare(variant: str, model: nn.Module, task: dict[str, Any]) -> tuple[TrainStep, Any]:
    """Return a variant's step, and its engine if that is this project's."""
    system, section, compiled = VARIANTS[variant]
    bf16, number = task["dtype"] == "bf16", task["micro_batches"]
    if system == "plain":
        return by_torch(model, adamw(model), number, autocast=bf16), None
    if system == "ddp":
        init_process_group()
        if compiled:
            for block in blocks_of(model):
                block.compile()
        places = [device().index] if torch.accelerator.is_available() else None
        wrapped = nn.parallel.DistributedDataParallel(
            model, device_ids=places, gradient_as_bucket_view=True
        )
        return by_torch(wrapped, adamw(wrapped), number, autocast=bf16), None
    if system == "fsdp2":
        shard_by_torch(model, bf16, compiled=compiled, **section)
        return by_torch(model, adamw(model), number), None
    config = {
        "train_micro_batch_size_per_gpu": task["batch"] // number,
        "gradient_accumulation_steps": number,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": bf16},
        "zero_optimization": section_of(variant, task["folder"]),
    }
    if task["live"]:
        config["zero_optimization"]["stage3_max_live_parameters"] = task["live"]
    if system == "zero":
        config["activation_checkpointing"] = {"batch_slices": task["slices"]}
        config["compile"] = {"enabled": compiled}
        config |= task["keys"]
    elif variant == "deepspeed3-files":
        config["aio"] = {"block_size": 1 << 20, "queue_depth": 16}
        # Without it, weights in files are bf16 on a CPU, and those of the model are not.
        importlib.import_module("deepspeed").zero.Init(module=model, config_dict_or_path=config)
    engine = initialize(system, model, config)
    return by_engine(engine, number), engine if system == "zero" else None


def batches_of(model: nn.Module, batch: int, length: int, one: bool, seed: int) -> Iterator[Batch]:
    """Yield random tokens on the device; `one`: always the same ones. A Llama's labels are its
    inputs.
    """
    vocabulary = model.config.vocab_size
    batches = synthetic_batches(vocabulary, batch, length, length, seed)
    for each in repeat(next(batches)) if one else batches:
        labels = each["labels" if model.config.is_encoder_decoder else "input_ids"]
        inputs = {"input_ids": each["input_ids"], "labels": labels}
        yield {name: value.to(device()) for name, value in inputs.items()}


def graphs() -> int:
    """Return how many graphs were compiled so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def moved(engine: Any) -> dict[str, int]:
    """Return bytes read and written on disks by this process so far, and elements that this engine
    has gathered and reduced. Updates and reads ahead that are under way are left alone.
    """
    found = {}
    if engine is not None:
        kinds = {"gathered": "all_gather", "reduced": "reduce_scatter"}
        found = {name: engine.comm.elements.get(kind, 0) for name, kind in kinds.items()}
    storage = of_this_process("io")
    return found | {"read": storage["read_bytes"], "written": storage["write_bytes"]}


def train(variant: str, model: str, checkpointing: bool, **task: Any) -> dict[str, Any]:
    """Train, and return what a counted step takes: wall and CPU seconds, peaks of memory, and for
    this engine its phases and waits and what it moved. Losses are those of all steps.

    `keys` are added to this engine's configuration. `quantized`: adapters on a base in NF4.
    `most`: bytes of the device's memory that may be used.

    On a GPU, the counted steps are waited for at their end only, as in a run that does not log each
    loss: `issued` are the seconds until the host has given all work to the GPU. On a CPU, seconds
    are the median over the steps."""
    on_gpu, steps = torch.accelerator.is_available(), task["steps"]
    use(device())
    with device():
        built = build(model)
    parameters = sum(param.numel() for param in built.parameters())
    if checkpointing:
        built.gradient_checkpointing_enable({"use_reentrant": False})
    if task.get("quantized"):
        built = with_adapters(built, torch.bfloat16 if task["dtype"] == "bf16" else torch.float32)
    train_step, engine = prepare(variant, built, task)
    if "most" in task:
        fraction = task["most"] / torch.accelerator.get_memory_info()[1]
        torch.get_device_module().set_per_process_memory_fraction(fraction)
    seed = dist.get_rank() if dist.is_initialized() else 0
    batches = batches_of(built, task["batch"], task["length"], task["one_batch"], seed)

    began = time.perf_counter()
    losses = [train_step(next(batches)).item()]
    first = time.perf_counter() - began
    losses += [train_step(batch).item() for batch in islice(batches, task["warmup"] - 1)]
    compiled = graphs() if VARIANTS[variant].compiled else 0
    forget_peaks()
    counts = [moved(engine)]

    def counted_step(batch: Batch) -> torch.Tensor:
        loss = train_step(batch)
        counts.append(moved(engine))
        return loss

    if engine is not None:
        engine.comm.clock.reset()
    if on_gpu:
        torch.accelerator.synchronize()
        start, cpu = time.perf_counter(), time.process_time()
        found = [counted_step(batch).detach() for batch in islice(batches, steps)]
        issued = time.perf_counter() - start
        torch.accelerator.synchronize()
        costs = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
        costs = {name: value / steps for name, value in (costs | {"issued": issued}).items()}
        losses += [loss.item() for loss in found]
    else:
        each = [timed(lambda b=b: counted_step(b).item()) for b in islice(batches, steps)]
        costs = medians([cost for cost, _ in each])
        losses += [loss for _, loss in each]
    memory = of_this_process()
    if VARIANTS[variant].compiled and graphs() != compiled:
        raise RuntimeError("graphs were compiled in counted steps")
    result = costs | {
        "name": torch.cuda.get_device_name() if torch.cuda.is_available() else device().type,
        "parameters": parameters,
        "losses": losses,
        "first": first,
        "steady": memory["VmRSS"],
        "host": memory["VmHWM"],
        "device": torch.accelerator.max_memory_allocated() if on_gpu else 0,
        "reserved": torch.accelerator.max_memory_reserved() if on_gpu else 0,
    }
    result |= medians([{k: new[k] - old[k] for k in old} for old, new in pairwise(counts)])
    if engine is None:
        return result
    clock, result["slices"] = engine.comm.clock, engine.slices.number
    result["phases"] = {name: spent / steps for name, spent in clock.phases.items()}
    result["waits"] = {": ".join(name): spent / steps for name, spent in clock.waits.items()}
    return result
