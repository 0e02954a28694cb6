"""One rank of one system of the optimizer benchmark: trains a small Llama with several optimizers,
at several stages.

`benchmarks.optimizers` starts it on each rank, in this environment or (system `deepspeed`) in one
that has DeepSpeed. A system is a function from a plain model, an optimizer's name and a stage to a
`Trained`. All systems train in fp32 on the same global batches, without clipping."""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.launch import report

# 7.4M parameters; 56 of its matrices, 6.3M parameters, belong to Muon.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}
VOCABULARY, LENGTH, BUILD_SEED = 2048, 32, 1
LR, MUON_LR = 1e-3, 0.02
MUON = {
    "type": "Muon",
    "params": {"lr": MUON_LR, "adam_lr": LR, "momentum": 0.95, "weight_decay": 0.0},
}
ADAM = {"betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}  # beside Muon; DeepSpeed's values

Batch = dict[str, torch.Tensor]


@dataclass
class Trained:
    """A model in training. Attributes: step: trains on this rank's rows, gives their loss. state:
    the optimizer's, as this rank has it. end: frees what the system holds."""

    step: Callable[[Batch], torch.Tensor]
    state: Callable[[], Any]
    end: Callable[[], None] = lambda: None


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)]


def adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(model.parameters(), lr=1e-2)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's Muon for the matrices of blocks, and its AdamW for the rest."""
    hidden = [param for name, param in model.named_parameters() if "_proj" in name]
    others = [param for name, param in model.named_parameters() if "_proj" not in name]
    return [
        torch.optim.Muon(hidden, lr=MUON_LR, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=LR, **ADAM),
    ]


def torchao_8bit(model: nn.Module) -> list[torch.optim.Optimizer]:
    from torchao.optim import AdamW8bit

    return [AdamW8bit(model.parameters(), lr=LR, weight_decay=0.0)]


def bitsandbytes_8bit(model: nn.Module) -> list[torch.optim.Optimizer]:
    from bitsandbytes.optim import AdamW8bit

    return [AdamW8bit(model.parameters(), lr=LR, weight_decay=0.0)]


OPTIMIZERS = {
    "AdamW": adamw,
    "Adafactor": adafactor,
    "Muon": muon,
    "AdamW 8-bit (torchao)": torchao_8bit,
    "AdamW 8-bit (bitsandbytes)": bitsandbytes_8bit,
}


def _in_torch(model: nn.Module, name: str) -> Trained:
    optimizers = OPTIMIZERS[name](model)

    def step(batch: Batch) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Trained(
        step, lambda: [each for optimizer in optimizers for each in optimizer.state.values()]
    )


def plain(model: nn.Module, name: str, stage: int) -> Trained:
    """Plain torch in one process, on whole batches: the reference of losses."""
    return _in_torch(model, name)


def fsdp2(model: nn.Module, name: str, stage: int) -> Trained:
    """`fully_shard` on each block and on the root.

    Stage 2: parameters stay gathered from forward to backward.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in [*model.model.layers, model]:
        fully_shard(part, mesh=mesh, reshard_after_forward=stage == 3)
    return _in_torch(model, name)


def _initialized(package: Any, model: nn.Module, name: str, sections: dict[str, Any]) -> Any:
    """An engine with DeepSpeed's interface. `package`: `zero` or the real `deepspeed`."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        **sections,
    }
    config["zero_allow_untested_optimizer"] = True
    if name == "Muon":
        config["optimizer"] = MUON
        return package.initialize(model=model, model_parameters=model.parameters(), config=config)[
            0
        ]
    (optimizer,) = OPTIMIZERS[name](model)
    return package.initialize(model=model, optimizer=optimizer, config=config)[0]


def _by_engine(engine: Any, state: Callable[[], Any]) -> Trained:
    def step(batch: Batch) -> torch.Tensor:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss

    return Trained(step, state, engine.destroy)


def ours(model: nn.Module, name: str, stage: int) -> Trained:
    """This engine."""
    import zero

    engine = _initialized(zero, model, name, {"zero_optimization": {"stage": stage}})
    return _by_engine(engine, lambda: list(engine.optimizer.state.values()))


def deepspeed(model: nn.Module, name: str, stage: int) -> Trained:
    """DeepSpeed. Its Muon demands that gradients are not reduce-scattered."""
    import deepspeed

    section = {"stage": stage} | ({"reduce_scatter": False} if name == "Muon" else {})
    engine = _initialized(deepspeed, model, name, {"zero_optimization": section})
    return _by_engine(engine, lambda: list(engine.optimizer.optimizer.state.values()))


SYSTEMS = {"plain": plain, "ours": ours, "fsdp2": fsdp2, "deepspeed": deepspeed}


def nbytes(state: Any) -> int:
    """Bytes of all tensors in a state that this rank holds: of a DTensor its local part, of a
    wrapper what it wraps.
    """
    total = 0
    for value in tree_leaves(state):
        if isinstance(value, dist.tensor.DTensor):
            total += nbytes(value.to_local())
        elif is_traceable_wrapper_subclass(value):
            total += nbytes([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        elif isinstance(value, torch.Tensor):
            total += value.nbytes
    return total


def batches(rows: int, count: int) -> Iterator[Batch]:
    """Yield global batches of random tokens, (rows, LENGTH)."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(
    system: str, name: str, stage: int, rows: int, warmup: int, steps: int
) -> dict[str, Any]:
    """CPU (all threads) and wall seconds of each counted step, the losses of all steps, and bytes
    of state.
    """
    torch.manual_seed(BUILD_SEED)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **SIZES))
    parameters = sum(param.numel() for param in model.parameters())
    trained = SYSTEMS[system](model, name, stage)
    found: dict[str, Any] = {"cpu": [], "wall": [], "losses": [], "parameters": parameters}
    for batch in batches(rows, warmup + steps):
        own = {
            key: value.chunk(dist.get_world_size())[dist.get_rank()] for key, value in batch.items()
        }
        dist.barrier()
        cpu, wall = cpu_seconds(), time.perf_counter()
        loss = trained.step(own)
        found["cpu"].append(cpu_seconds() - cpu)
        found["wall"].append(time.perf_counter() - wall)
        found["losses"].append(loss.item())
    found["cpu"], found["wall"] = found["cpu"][warmup:], found["wall"][warmup:]
    found["state"] = nbytes(trained.state())
    trained.end()
    return found


def outcome(*case: Any) -> dict[str, Any]:
    """What `measure` finds. If a system cannot do it, the table says why, and the others go on."""
    try:
        return measure(*case)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[0]}"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, required=True)
    parser.add_argument("--stages", nargs="+", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True, help="of a global batch")
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    if args.system == "deepspeed":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")
    cases = [(name, stage) for name in args.optimizers for stage in args.stages]
    report(
        {
            f"{n}, {s}": outcome(args.system, n, s, args.rows, args.warmup, args.steps)
            for n, s in cases
        }
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
