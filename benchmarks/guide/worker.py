"""One rank of `benchmarks.guide`: the guide's networks on this engine and on plain torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.utils.checkpoint import checkpoint

import zero
from benchmarks.measuring import PeakMemory, let_go, state_bytes
from benchmarks.models import build, llama, synthetic_batches
from benchmarks.stages.worker import MODELS, STAGES, VOCABULARY
from zero.offload.activations import HostActivations
from zero.parallel.pipeline import Pipeline, split

INPUTS, BATCH, LR, SEED = 1000, 32, 1e-3, 1
CPU = torch.device("cpu")
Rows = list[dict[str, Any]]


# -- training


def mlp(width: int) -> nn.Sequential:
    torch.manual_seed(SEED)
    layers = [
        nn.Linear(INPUTS, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 1),
    ]
    return nn.Sequential(*layers)


def data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(rows, INPUTS, generator=generator), torch.randn(rows, 1, generator=generator)


def train(rows: int, epochs: int, rank: int, ranks: int, step: Callable) -> list[float]:
    """Return the mean loss of each epoch.

    `step` trains on this rank's rows of a batch, and returns their loss.
    """
    inputs, targets = data(rows)
    losses = torch.zeros(epochs, dtype=torch.float64)
    for epoch in range(epochs):
        batches = range(0, rows - BATCH + 1, BATCH)
        for start in batches:
            mine = slice(start + BATCH * rank // ranks, start + BATCH * (rank + 1) // ranks)
            losses[epoch] += step(inputs[mine], targets[mine]) / len(batches)
    if ranks > 1:
        dist.all_reduce(losses)
    return (losses / ranks).tolist()


def plain_step(model: nn.Module) -> Callable:
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def engine_step(engine: zero.ZeroEngine, states: dict[str, int]) -> Callable:
    """A step that also counts the model states before its first update."""

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        if engine.global_steps == 1:  # the moments are there
            states.update(state_bytes(engine))
        engine.step()
        return loss.item()

    return step


def measured(name: str, act: Callable[[], list[float]]) -> dict[str, Any]:
    let_go()
    dist.barrier()
    with PeakMemory("VmRSS") as peak:
        wall, cpu = time.perf_counter(), time.process_time()
        losses = act()
        seconds = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    return {"run": name, **seconds, "peak": peak.most, "losses": losses}


def training(width: int, rows: int, epochs: int) -> Rows:
    dist.init_process_group("gloo")
    parameters = sum(param.numel() for param in mlp(width).parameters())
    plain = partial(train, rows, epochs, 0, 1, plain_step(mlp(width)))
    found = [measured("plain torch, 1 process", plain)]
    found[0] |= {"states": 16 * parameters}  # fp32: parameter, gradient, two moments
    for stage in STAGES:
        states: dict[str, int] = {}
        act = partial(train_engine, width, rows, epochs, stage, states)
        found.append(measured(f"stage {stage}", act))
        found[-1] |= {"states": sum(states.values())}  # nothing is accumulated
    return [row | {"parameters": parameters} for row in found]


def train_engine(
    width: int, rows: int, epochs: int, stage: int, states: dict[str, int]
) -> list[float]:
    rank, ranks, model = dist.get_rank(), dist.get_world_size(), mlp(width)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "gradient_clipping": 0.0,  # as plain torch; without this key it would be 1.0
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    engine = zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    losses = train(rows, epochs, rank, ranks, engine_step(engine, states))
    engine.destroy()
    return losses


# -- activations


@contextlib.contextmanager
def counting(model: nn.Module, found: dict[str, int]) -> Iterator[None]:
    """Count the bytes of distinct storages that autograd saves inside of the context, without
    parameters.
    """
    seen, kept = {param.untyped_storage().data_ptr() for param in model.parameters()}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept.append(tensor)  # so that no other tensor gets this address
            found["saved"] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


class Checkpointed(nn.Module):
    """Keeps the input of each of `parts` only, and computes the rest again in backward."""

    def __init__(self, parts: list[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            hidden = checkpoint(part, hidden, use_reentrant=False)
        return hidden


def shares_storage(addresses: set[int], tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in addresses


def networks() -> dict[str, tuple[nn.Module, nn.Module]]:
    """The guide's two networks by name: plain, and with checkpoints."""
    three = [nn.Linear(1000, 4000), nn.Linear(4000, 4000), nn.Linear(4000, 1000)]
    twenty = [nn.Sequential(nn.Linear(1000, 1000), nn.ReLU()) for _ in range(20)]
    # Checkpoints around single layers keep as much as no checkpoints: so segments of several
    # layers.
    fives = [nn.Sequential(*twenty[start : start + 5]) for start in range(0, 20, 5)]
    return {
        "3 linear layers, each a checkpoint": (nn.Sequential(*three), Checkpointed(three)),
        "20 x (Linear + ReLU), each a checkpoint": (nn.Sequential(*twenty), Checkpointed(twenty)),
        "20 x (Linear + ReLU), 4 checkpoints": (nn.Sequential(*twenty), Checkpointed(fives)),
    }


def of_t5() -> dict[str, Any]:
    """A T5 of 42M parameters, with the gradient checkpointing that the Trainer turns on."""
    model = build(MODELS[0])
    batch = next(synthetic_batches(VOCABULARY, 4, 128, 128, SEED))
    row: dict[str, Any] = {
        "network": "T5 of 42M parameters, 4 x (128 + 128) tokens, a checkpoint for each block"
    }
    for way in ("without", "with"):
        found = {"saved": 0}
        with counting(model, found):
            model(**batch).loss.backward()
        row[way] = found["saved"]
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return row


def activations() -> Rows:
    rows = [of_t5()]
    for name, models in networks().items():
        inputs = torch.randn(BATCH, 1000, requires_grad=True)
        row: dict[str, Any] = {"network": name}
        for way, model in zip(("without", "with"), models, strict=True):
            found = {"saved": 0}
            with counting(model, found):
                loss = model(inputs).square().mean()
            loss.backward()
            row[way] = found["saved"]
        moved = HostActivations(CPU)
        # On a CPU the engine does not use it. It is told that the weights need not be moved, as the
        # engine's groups do.
        moved._is_parameter = partial(
            shares_storage, {p.untyped_storage().data_ptr() for p in models[0].parameters()}
        )
        with moved.context():
            models[0](inputs).square().mean()
        row["offloaded"] = moved.moved_bytes
        rows.append(row)
    return rows


# -- meshes

# Large enough that padding does not count.
LLAMA = 256, 512, 8, 8, 512
LENGTH, MICRO_BATCHES = 16, 4


def meshes() -> Rows:
    dist.init_process_group("gloo")
    world, rows = dist.get_world_size(), []
    for shape in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)):
        if shape[0] * shape[1] * shape[2] == world:
            rows += [mesh_states(*shape, stage) for stage in STAGES]
    for sequence in (2, 4, 8):
        if world % sequence == 0:
            rows += [sequence_states(world // sequence, sequence, stage) for stage in STAGES]
    return rows


def mesh_states(data: int, tensor: int, pipeline: int, stage: int) -> dict[str, Any]:
    """Run two steps in bf16, and return this rank's model states before the second update."""
    mesh = init_device_mesh("cpu", (pipeline, data, tensor), mesh_dim_names=("pp", "shard", "tp"))
    model, config = for_meshes(stage)
    config["gradient_accumulation_steps"] = MICRO_BATCHES
    sizes = {"data": data, "sequence": 1, "tensor": tensor, "pipeline": pipeline, "stage": stage}
    sizes["elements"] = sum(param.numel() for param in model.parameters())
    engine, *_ = zero.initialize(model=split(model, mesh), config=config, mesh=mesh)
    pipe = Pipeline(engine, mesh, LENGTH, Schedule1F1B)
    ids = torch.randint(LLAMA[-1], (MICRO_BATCHES, LENGTH))
    return sizes | states_of_second_step(engine, lambda: pipe.step(ids, ids))


def sequence_states(data: int, sequence: int, stage: int) -> dict[str, Any]:
    """The same, where `sequence` ranks share each sequence.

    Each takes the loss of its own tokens.
    """
    model, config = for_meshes(stage)
    sizes = {"data": data, "sequence": sequence, "tensor": 1, "pipeline": 1, "stage": stage}
    sizes["elements"] = sum(param.numel() for param in model.parameters())
    engine, *_ = zero.initialize(model=model, config=config | {"sequence_parallel_size": sequence})
    ids = torch.randint(LLAMA[-1], (1, LENGTH))
    whole = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(LENGTH)[None]}
    own = {
        name: value.chunk(sequence, dim=1)[dist.get_rank() % sequence]
        for name, value in whole.items()
    }

    def step() -> None:
        engine.backward(engine(**own).loss)
        engine.step()

    return sizes | states_of_second_step(engine, step)


def for_meshes(stage: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and a configuration."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return build(llama(*LLAMA, num_key_value_heads=8, tie_word_embeddings=False)), config


def states_of_second_step(
    engine: zero.ZeroEngine, train_step: Callable[[], object]
) -> dict[str, int]:
    """Take two steps. Returns this rank's model states before the second update."""
    states: dict[str, int] = {}
    update = engine.step

    def step() -> None:
        states.update(state_bytes(engine))
        update()

    engine.step = step
    for _ in range(2):
        train_step()
    engine.destroy()
    return states | {
        "states": sum(states[name] for name in ("parameters", "gradients", "optimizer"))
    }
