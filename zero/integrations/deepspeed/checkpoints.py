"""DeepSpeed's checkpoint tools that accelerate, Lightning and others call.

Only `zero.checkpoint` reads and writes checkpoints.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict

from zero.checkpoint.export import copied_state_dict
from zero.checkpoint.manifest import read_manifest
from zero.checkpoint.models import get_fp32_state_dict_from_zero_checkpoint
from zero.checkpoint.values import decode
from zero.comm import world


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a checkpoint's whole model in fp32 to `output_dir`, in files of at most
    `max_shard_size` with an index.

    The file is `model.safetensors` with `safe_serialization`, else `pytorch_model.bin`. Tied
    weights are stored once. The model is held in host memory; `zero consolidate` needs less. Raises
    ValueError for a missing or damaged checkpoint."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    size = sys.maxsize if max_shard_size is None else max_shard_size
    os.makedirs(output_dir, exist_ok=True)
    save_torch_state_dict(
        state, output_dir, max_shard_size=size, safe_serialization=safe_serialization
    )


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy every tensor in nested mappings, lists and tuples to `device`; other values are passed
    on as they are.

    `torch.save` writes the whole storage behind a view; a copy has a storage of its own size. A
    state dict is copied as `zero.checkpoint.export.copied_state_dict` says."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, Mapping):
        if item and all(isinstance(value, torch.Tensor) for value in item.values()):
            return copied_state_dict(item, world.get_rank())
        copies = {key: clone_tensors_for_torch_save(value, device) for key, value in item.items()}
        return type(item)(copies)  # pyright: ignore[reportCallIssue] a dict, or made as one
    if isinstance(item, Sequence) and not isinstance(item, str | bytes):
        copies = [clone_tensors_for_torch_save(value, device) for value in item]
        return type(item)(copies)  # pyright: ignore[reportCallIssue] a list or a tuple
    return item


# Lightning makes one file of a checkpoint by the two functions below. Its converter reads the stage
# from an optimizer file and `client_state` from a model file, both pickled. A checkpoint here has
# no pickle files. These functions make them, and they are removed at the end of the process.


def get_optim_files(checkpoint_dir: str | os.PathLike) -> list[str]:
    """The path of a file with {"optimizer_state_dict": {"zero_stage": the stage that was trained
    with}}.

    Args:
        checkpoint_dir: the checkpoint's own folder, the one with `checkpoint.json`; ValueError if
            it is none.
    """
    stage = read_manifest(Path(checkpoint_dir)).stage
    return [_write("optim_states.pt", {"optimizer_state_dict": {"zero_stage": stage}})]


def get_model_state_file(checkpoint_dir: str | os.PathLike, zero_stage: int) -> str:
    """The path of a file with the `client_state` that was given to `save_checkpoint`; errors as
    `get_optim_files`.
    """
    return _write("model_states.pt", decode(read_manifest(Path(checkpoint_dir)).client_state))


def _write(name: str, content: object) -> str:
    folder = tempfile.mkdtemp(prefix="zero-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, name)
    torch.save(content, path)
    return str(path)
