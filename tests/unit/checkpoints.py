"""A checkpoint of one tensor, written and read by the functions that write and read real ones."""

from pathlib import Path

import torch

from zero.checkpoint import folder as folders
from zero.checkpoint.files import Slice, open_checkpoint, write
from zero.checkpoint.manifest import DATA_FILE, FORMAT, FORMAT_VERSION


def save(
    save_dir: Path,
    tag: str,
    value: int = 1,
    latest: bool = True,
    world_size: int = 1,
    version: int = FORMAT_VERSION,
    **others: object,
) -> Path:
    """Do what `save_checkpoint` does on disk; `others` are entries of the manifest."""
    folder = folders.begin(save_dir, tag, 100)
    values = torch.full((4,), float(value))
    written = write([Slice.whole("weights/w", values)], folder, DATA_FILE.format(0))
    counts = "global_steps global_samples micro_steps skipped_steps stage".split()
    manifest = {
        **dict.fromkeys([*counts, "gradient_accumulation_steps"], 1),
        **dict.fromkeys(("loss_scaler", "lr_scheduler", "hf_config", "optimizer")),
        **{name: {} for name in ("parameters", "plain", "tied", "client_state")},
        "format": FORMAT, "version": version, "torch": torch.__version__, "time": "now", "tag": tag,
        "world_size": world_size, "random_states": [None] * world_size, "frozen_excluded": False,
        "files": {written["name"]: written["file"]}, "tensors": written["tensors"],
    } | others  # fmt: skip
    folders.commit(folder, tag, manifest, latest=latest)
    return save_dir / tag


def load(load_dir: Path, tag: str | None = None) -> int:
    """Return the value that was saved."""
    folder = folders.locate(load_dir, tag)
    found = torch.zeros(4)
    open_checkpoint(folder).read([Slice.whole("weights/w", found)])
    (value,) = found.unique().tolist()
    return int(value)


def flip(path: Path) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
