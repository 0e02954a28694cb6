"""Two functions of `deepspeed.utils.zero_to_fp32` by which Lightning makes one file of a checkpoint.

Its converter unpickles a file of the optimizer's, for the stage, and one of the model's, for what the script saved
beside the weights. A checkpoint here has no pickle files: these are made of its description for the one who asks, and
are gone at the end of the process.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import torch

from zero.checkpoint.manifest import read_manifest
from zero.checkpoint.values import decode


def _write(name: str, content: dict) -> str:
    folder = tempfile.mkdtemp(prefix="zero-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, name)
    torch.save(content, path)
    return str(path)


def get_optim_files(checkpoint_dir: str | os.PathLike) -> list[str]:
    """The path of a file with {"optimizer_state_dict": {"zero_stage": the stage that was trained with}}.

    Args: checkpoint_dir: the checkpoint's own folder, the one with `checkpoint.json`; ValueError if it is none.
    """
    stage = read_manifest(Path(checkpoint_dir)).stage
    return [_write("optim_states.pt", {"optimizer_state_dict": {"zero_stage": stage}})]


def get_model_state_file(checkpoint_dir: str | os.PathLike, zero_stage: int) -> str:
    """The path of a file with the `client_state` that was given to `save_checkpoint`; errors as `get_optim_files`."""
    return _write("model_states.pt", decode(read_manifest(Path(checkpoint_dir)).client_state))
