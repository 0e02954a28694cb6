"""Reads checkpoints in which one file has all values of a kind: a folder of transformers' Trainer,
and the full state dicts of FSDP that accelerate saves.

    model.safetensors   or several files with an index, pytorch_model.bin, pytorch_model_fsdp.bin,
                        adapter_model.safetensors
    optimizer.pt        numbers the parameters, as torch's optimizers do
    optimizer.bin       names them
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero.checkpoint.files import Stored, TensorSpec, tensors_of
from zero.checkpoint.models import ADAPTER_CONFIG, ADAPTER_FILE, skeleton, write_model
from zero.conversion import pickles
from zero.conversion.named import named_state, state_dicts
from zero.conversion.ours import copy_beside
from zero.conversion.training_state import TrainingState
from zero.errors import UsageError

OPTIMIZERS = "optimizer.pt", "optimizer.bin"
MODELS = (
    "model.safetensors",
    "model.safetensors.index.json",
    ADAPTER_FILE,
    "pytorch_model_fsdp.bin",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def recognizes(folder: Path) -> bool:
    return None not in (_first(folder, MODELS), _first(folder, OPTIMIZERS))


def _first(folder: Path, names: Sequence[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read(folder: Path) -> TrainingState:
    """Return the state in a folder.

    Raises UsageError, which names the file, if it cannot be read or does not fit the model in the
    folder's `config.json`.
    """
    model_file, optimizer_file = _first(folder, MODELS), _first(folder, OPTIMIZERS)
    assert model_file is not None and optimizer_file is not None
    weights = _weights(model_file)
    saved = pickles.load(optimizer_file)
    if not isinstance(saved, dict) or not saved.keys() >= {"state", "param_groups"}:
        raise UsageError(f"{optimizer_file}: it has no `state` and `param_groups` of an optimizer")
    optimizer, groups = saved["state"], saved["param_groups"]
    described = any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    model = model_of(folder) if described or optimizer_file.name == "optimizer.pt" else None
    if model is not None and optimizer_file.name == "optimizer.pt":
        optimizer, groups = _named(model, optimizer, groups, optimizer_file)
    source = f"the Trainer's {model_file.name} and {optimizer_file.name}"
    return named_state(source, model_file, weights, optimizer, groups, model)


# -- weights


def _weights(path: Path) -> dict[str, Stored]:
    """Return the tensors in a file, or in the files of an index."""
    if path.suffix == ".json":
        return {k: value for file in _files_of_index(path) for k, value in _weights(file).items()}
    if path.suffix == ".safetensors":
        return tensors_of(path)
    content = pickles.load(path)
    if not isinstance(content, dict):
        raise UsageError(f"{path}: it is no state dict")
    return {name: each for name, each in content.items() if isinstance(each, Stored)}


def _files_of_index(path: Path) -> list[Path]:
    """Return the files of a model that are named in its index."""
    try:
        names = json.loads(path.read_text())["weight_map"].values()
        return [path.parent / Path(name).name for name in dict.fromkeys(names)]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None


# -- the model


def model_of(folder: Path) -> nn.Module:
    """Build the model of a folder's `config.json`, or the adapters of its `adapter_config.json`,
    without memory for weights. Its parameters have the order that the optimizer had.
    """
    return _with_adapters(folder) if (folder / ADAPTER_CONFIG).is_file() else skeleton(folder)


def _with_adapters(folder: Path) -> nn.Module:
    import peft

    config = peft.PeftConfig.from_pretrained(str(folder))
    base = Path(str(config.base_model_name_or_path))
    if not (base / "config.json").is_file():
        raise UsageError(
            f"{folder / ADAPTER_CONFIG}: base_model_name_or_path is {base}, which is no folder "
            "with a config.json; write the path of the base model there"
        )
    config.inference_mode = False
    with torch.device("meta"):
        return peft.get_peft_model(skeleton(base), config)


def _named(
    model: nn.Module, optimizer: dict[int, dict], groups: list[dict[str, Any]], file: Path
) -> tuple[dict[str, dict], list[dict[str, Any]]]:
    """Return the state and the param groups of an optimizer with names instead of numbers."""
    names = _names_of(model, groups, file)
    numbers = chain.from_iterable(group["params"] for group in groups)
    of_number = dict(zip(numbers, chain.from_iterable(names), strict=True))
    named = [group | {"params": of_group} for group, of_group in zip(groups, names, strict=True)]
    return {of_number[number]: each for number, each in optimizer.items()}, named


def _names_of(model: nn.Module, groups: Sequence[dict[str, Any]], file: Path) -> list[list[str]]:
    """Return the names of the parameters in each param group, in the order of the file's numbers.

    A torch optimizer that was given names has stored them. Otherwise the groups must be those of
    the Trainer, or one group of all trained parameters.
    """
    if all("param_names" in group for group in groups):
        return [list(group["param_names"]) for group in groups]
    from transformers import Trainer

    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    # The method uses nothing of its Trainer.
    decay = set(Trainer.get_decay_parameter_names(None, model))  # pyright: ignore[reportArgumentType]
    with_decay = [name for name in trained if name in decay]
    possible = [[with_decay, [name for name in trained if name not in decay]], [trained]]
    counts = [len(group["params"]) for group in groups]
    for names in possible:
        if counts == [len(each) for each in names]:
            return names
    raise UsageError(
        f"{file}: it has param groups of {counts} parameters. The Trainer would make groups of "
        f"{[len(each) for each in possible[0]]}, or an optimizer of all {len(trained)} trained "
        "parameters one group; other groups have no names in the file, so they are not taken over"
    )


# -- write


def write(state: TrainingState, out: Path) -> None:
    """Write what the Trainer loads without any engine: the model, `optimizer.pt`, and its own
    files. The model's weights are fp32.

    The values are in a temporary file on the way. Raises OSError if the disk has no space for them.
    """
    if state.frozen_excluded:
        raise UsageError(
            f"{state.source}: it lacks the frozen weights; write adapters with zero consolidate"
        )
    model, optimizer = state_dicts(state)
    specs = [
        TensorSpec(name, value.shape, value.dtype)
        for name, value in model.items()
        if name not in state.tied
    ]
    write_model(out, specs, (model[spec.name] for spec in specs), state.model_config)
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    number_of = {name: number for number, name in enumerate(names)}
    for group in optimizer["param_groups"]:
        group["params"] = [number_of[name] for name in group["params"]]
    numbered = {number_of[name]: each for name, each in optimizer["state"].items()}
    pickles.save(optimizer | {"state": numbered}, out / "optimizer.pt")
    copy_beside(state, out)
