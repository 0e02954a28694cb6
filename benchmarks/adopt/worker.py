"""One rank of runs that start, or go on from a checkpoint, and may save one. Reports their losses.

`benchmarks.adopt` and `tests/fixtures/deepspeed/make.py` start it with zero and with DeepSpeed.
Only the name of the package differs. A step has the same rows on any number of ranks that divides
`ROWS`."""

from __future__ import annotations

import importlib
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn

from benchmarks import models
from benchmarks.models import llama, synthetic_batches, t5

VOCABULARY, LENGTH, ROWS = 32, 8, 6


def build(name: str) -> nn.Module:
    if name == "t5":
        return models.build(t5(8, 16, 1, 2, 4, VOCABULARY), seed=3)
    model = models.build(llama(8, 16, 1, 2, VOCABULARY), seed=3)
    if name == "llama":
        return model
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    return get_peft_model(model, lora)


def param_groups(model: nn.Module) -> list[dict]:
    """Return the Trainer's two groups: with and without weight decay. Of LoRA's adapters, the
    second is empty."""
    trained = [param for param in model.parameters() if param.requires_grad]
    decay = [param for param in trained if param.ndim > 1]
    others = [param for param in trained if param.ndim <= 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def loss_of(engine: nn.Module, name: str, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of the rows, whose rounding does not depend on their number."""
    labels = rows["labels"]
    if name == "t5":
        logits = engine(**rows).logits
    else:
        logits, labels = (
            engine(input_ids=rows["input_ids"]).logits[:, :-1],
            rows["input_ids"][:, 1:],
        )
    return nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten())


def run(package: Any, settings: dict[str, Any]) -> list[float]:
    """Run the steps from `first` to `last`, and return their mean losses over all ranks.

    Settings:
        model, config: the name of the model, and the configuration. "lora" is the name of adapters,
            which are saved without the base model, as the Trainer does.
        load: the folder to go on from, if any.
        save, save_at: the folder to save to after so many steps, if any.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build(settings["model"])
    config = settings["config"] | {"train_micro_batch_size_per_gpu": ROWS // world_size}
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2)
    engine, *_ = package.initialize(model=model, optimizer=optimizer, config=config)
    is_part = settings["model"] == "lora"
    if "load" in settings:
        folder, _ = engine.load_checkpoint(settings["load"], load_module_strict=not is_part)
        assert folder is not None
    losses = []
    batches = synthetic_batches(VOCABULARY, ROWS, LENGTH, LENGTH, seed=5)
    for step, batch in enumerate(islice(batches, settings["last"])):
        if step < settings["first"]:
            continue
        rows = {name: values[rank::world_size].contiguous() for name, values in batch.items()}
        loss = loss_of(engine, settings["model"], rows)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
        if step + 1 == settings.get("save_at"):
            engine.save_checkpoint(settings["save"], exclude_frozen_parameters=is_part)
    return losses


def run_runs(package: str, runs: list[dict[str, Any]]) -> list[list[float]]:
    """On a rank: do each run with `zero` or `deepspeed`, and return its losses."""
    library = importlib.import_module(package)
    library.comm.init_distributed(dist_backend="gloo")
    return [run(library, settings) for settings in runs]
