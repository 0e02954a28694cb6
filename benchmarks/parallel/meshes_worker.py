"""One rank of one variant of the mesh benchmark: trains a Llama on synthetic batches and reports
what a step takes.

`benchmarks.parallel.meshes` calls `measure` on each rank. A variant is a function from a mesh to
`train_step(ids) -> loss`. Both use torch's fused AdamW and clip gradients to a global norm of 1.0.
Both divide layers in the same places."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero
from benchmarks import models
from benchmarks.measuring import timed
from benchmarks.models import llama
from benchmarks.runner import medians
from benchmarks.step.worker import CLIP
from zero.parallel.pipeline import Pipeline, next_token_loss, split

HIDDEN, VOCABULARY = 256, 2048
MICRO_BATCHES = 4  # of a pipeline
LEARNING_RATE = 1e-4
TrainStep = Callable[[torch.Tensor], float]


def build() -> nn.Module:
    shape = llama(HIDDEN, 688, 4, 8, VOCABULARY, num_key_value_heads=8, tie_word_embeddings=False)
    return models.build(shape)


def ours(mesh: DeviceMesh, args: SimpleNamespace) -> TrainStep:
    """This engine."""
    micro_batches = MICRO_BATCHES if args.pipeline > 1 else 1
    config = {
        "train_micro_batch_size_per_gpu": args.batch // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": args.stage},
    }
    model = split(build(), mesh) if args.pipeline > 1 else build()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
    )
    engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=config, mesh=mesh)
    if args.pipeline > 1:
        pipe = Pipeline(engine, mesh, args.length, Schedule1F1B)
        return lambda ids: pipe.step(ids, ids)

    def train_step(ids: torch.Tensor) -> float:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return train_step


def cut_by_torch(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism by torch's styles, where transformers' plan for Llama has them."""
    layer = dict.fromkeys(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel
    )
    layer |= {"self_attn.o_proj": RowwiseParallel, "mlp.down_proj": RowwiseParallel}
    layer |= {"mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel}
    for each in model.model.layers:
        parallelize_module(each, mesh, {name: style() for name, style in layer.items()})
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)


def shard_by_torch(root: nn.Module, model: nn.Module, mesh: DeviceMesh, stage: int) -> None:
    """`fully_shard` on each layer and on the root.

    Stage 1: weights stay from forward to backward.
    """
    for layer in model.model.layers:
        if next(layer.parameters(), None) is not None:  # the other layers are on other ranks
            fully_shard(layer, mesh=mesh, reshard_after_forward=stage == 3)
    fully_shard(root, mesh=mesh, reshard_after_forward=stage == 3)


def by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each mesh.

    Norms are not cut over `tp`, and torch's lists of DTensors must have one mesh.
    """
    found: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for param in model.parameters():
        found.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(
            param
        )
    return list(found.values())


def clip(params: list[list[nn.Parameter]], pipelines: dist.ProcessGroup | None) -> None:
    """Clip to the norm over all parameters, of all stages: (torch's own function knows one mesh and
    one stage).
    """
    norms = [
        torch.nn.utils.get_total_norm([param.grad for param in group], foreach=True)
        for group in params
    ]
    local = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    squares = torch.stack(local).square().sum()
    if pipelines is not None:
        dist.all_reduce(squares, group=pipelines)
    for group in params:
        torch.nn.utils.clip_grads_with_norm_(group, CLIP, squares.sqrt(), foreach=True)


def fsdp2(mesh: DeviceMesh, args: SimpleNamespace) -> TrainStep:
    """torch's own parts:

    `parallelize_module`, or a `PipelineStage`, and `fully_shard` over the rest.
    """
    model = split(build(), mesh) if args.pipeline > 1 else build()
    if args.tensor > 1:
        cut_by_torch(model, mesh["tp"])
    root = Stage(model, mesh.get_coordinate()[0] == 0) if args.pipeline > 1 else model
    shard_by_torch(root, model, mesh["shard"], args.stage)
    params = by_mesh(root)
    groups = [{"params": group} for group in params]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    forward = (
        pipeline_of_torch(root, mesh, args) if args.pipeline > 1 else partial(whole_model, root)
    )
    pipelines = mesh.get_group("pp") if args.pipeline > 1 else None

    def train_step(ids: torch.Tensor) -> float:
        loss = forward(ids)
        clip(params, pipelines)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def whole_model(model: nn.Module, ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item()


class Stage(nn.Module):
    """What `split` has left of the model, as torch's schedules call it."""

    def __init__(self, model: nn.Module, is_first: bool):
        super().__init__()
        self.model = model
        self.name = "input_ids" if is_first else "inputs_embeds"

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.model(**{self.name: tensor}, use_cache=False).logits


def pipeline_of_torch(
    stage: Stage, mesh: DeviceMesh, args: SimpleNamespace
) -> Callable[[torch.Tensor], float]:
    """torch's 1F1B over the ranks of `pp`."""
    group, rows = mesh.get_group("pp"), args.batch // MICRO_BATCHES
    number = mesh.get_coordinate()[0]
    is_first, is_last = number == 0, number == args.pipeline - 1
    ids = torch.empty(rows, args.length, dtype=torch.int64, device="meta")
    hidden = torch.empty(rows, args.length, HIDDEN, device="meta", requires_grad=True)
    logits = torch.empty(rows, args.length, VOCABULARY, device="meta", requires_grad=True)
    ends = ids if is_first else hidden, logits if is_last else hidden
    of_torch = PipelineStage(stage, number, args.pipeline, torch.device("cpu"), *ends, group=group)
    tokens = args.batch * (args.length - 1)
    schedule = Schedule1F1B(
        of_torch,
        MICRO_BATCHES,
        lambda out, labels: next_token_loss(out, labels) / tokens,
        scale_grads=False,
    )

    def run(batch: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        schedule.step(
            *([batch] if is_first else []), target=batch if is_last else None, losses=losses
        )
        return sum(loss.item() for loss in losses)

    return run


VARIANTS = {"zero": ours, "fsdp2": fsdp2}


def measure(variant: str, mesh: list[int], **task: Any) -> dict[str, Any]:
    """Train, and return the medians of a counted step, and the losses of all steps."""
    args = SimpleNamespace(**dict(zip(("pipeline", "shard", "tensor"), mesh, strict=True)), **task)
    dist.init_process_group("gloo")
    made = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("pp", "shard", "tp"))
    coordinates = made.get_coordinate()
    train_step = VARIANTS[variant](made, args)
    generator, each = torch.Generator().manual_seed(coordinates[1]), []
    for _ in range(args.warmup + args.steps):
        ids = torch.randint(VOCABULARY, (args.batch, args.length), generator=generator)
        each.append(timed(partial(train_step, ids)))
    costs = medians([cost for cost, _ in each[args.warmup :]])
    is_end = coordinates[0] == args.pipeline - 1
    return costs | {"losses": [loss for _, loss in each], "pipeline_end": is_end}
