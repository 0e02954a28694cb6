"""The command `zero inspect`: shows what a checkpoint contains, or which checkpoints a folder has.

It verifies all checksums, and needs no torch for that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from zero.checkpoint import folder as folders
from zero.checkpoint.blocks import check_files, verify
from zero.checkpoint.folder import check_resumable
from zero.checkpoint.manifest import KIND, MANIFEST, itemsize, read_manifest
from zero.errors import size
from zero.tools.arguments import Parser


def command(arguments: list[str]) -> None:
    """Run `zero inspect ARGUMENTS`."""
    options = Parser("inspect").parse_args(arguments)
    path = Path(options.checkpoint)
    if several := checkpoints(path):
        found: Any = {"checkpoints": several}
        text = listing(several)
    else:
        found = facts(path)
        text = describe(found)
    # Print even names that are not valid text, such as half of a surrogate pair.
    text = text.encode(errors="backslashreplace").decode()
    print(json.dumps(found, indent=2) if options.json else text)


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    """What is known of each checkpoint in the Trainer's output folder, or in another folder with
    several, for JSON, the newest first. Their checksums are not verified.

    Empty for the folder of one checkpoint.
    """
    found = folders.of_trainer(folder)
    if not found and not (folder / MANIFEST).is_file():
        found = folders.newest_first([folder])
        found = found if len(found) > 1 else []
    return list(map(_entry, found))


def _entry(folder: Path) -> dict[str, Any]:
    manifest = problem = None
    try:
        place = folders.locate(folder, None) or folder
        manifest = read_manifest(place)
        if place == folder:
            check_files(place, manifest)
        else:
            check_resumable(folder, manifest.world_size, sums=False)
    except (ValueError, OSError) as error:
        problem = str(error)
    return {
        "checkpoint": str(folder),
        "steps": manifest.global_steps if manifest else folders.number_of(folder),
        "written": manifest.time if manifest else None,
        "complete": problem is None,
        "problem": problem,
    }


def listing(found: list[dict[str, Any]]) -> str:
    """Return `checkpoints` as text, a line for each."""
    rows = [("checkpoint", "step", "written", "")]
    for each in found:
        state = "complete" if each["complete"] else f"incomplete: {each['problem']}"
        rows.append((each["checkpoint"], str(each["steps"]), each["written"] or "-", state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row[:3], widths)) + f"  {row[3]}" for row in rows)
    shown = next((each for each in found if each["complete"]), found[0])["checkpoint"]
    return "\n".join([*map(str.rstrip, lines), "", f"Look at one: zero inspect {shown}"])


def facts(checkpoint: Path) -> dict[str, Any]:
    """Return the content of a checkpoint, for JSON. ValueError names a damaged file. Sizes are in
    bytes.

    A terminal shows on stderr how far the checksums are.
    """
    folder = folders.located(checkpoint)
    manifest, sizes = read_manifest(folder), {}
    check_files(folder, manifest)
    nbytes = sum(entry.bytes for entry in manifest.files.values())
    with tqdm(
        total=nbytes, unit="B", unit_scale=True, desc="checksums", disable=None, leave=False
    ) as bar:
        verify(folder, manifest, bar.update)
    for key, stored in manifest.tensors.items():
        kind, _, rest = key.partition("/")
        if kind == "optimizer":
            kind = f"optimizer {rest.split('/', 1)[0]}"
        kind = "buffers" if kind == "plain" else kind
        sizes[kind] = sizes.get(kind, 0) + stored.numel * itemsize(stored.dtype)
    parameters, scaler = manifest.parameters.values(), manifest.loss_scaler
    return {
        "checkpoint": str(folder),
        "checksums_verified": sum(len(entry.sums) for entry in manifest.files.values()),
        "written": manifest.time,
        "torch": manifest.torch,
        "format": manifest.version,
        "ranks": manifest.world_size,
        "stage": manifest.stage,
        "steps": manifest.global_steps,
        "skipped_steps": manifest.skipped_steps,
        "parameters": sum(entry.numel for entry in parameters),
        "trained_parameters": sum(entry.numel for entry in parameters if entry.trainable),
        "dtypes": sorted({entry.dtype for entry in parameters}),
        "optimizer": manifest.optimizer.classes[0] if manifest.optimizer else None,
        "scheduler": manifest.lr_scheduler,
        "loss_scale": scaler.get("scale") if isinstance(scaler, dict) else None,
        "client_state": [str(key) for key in _keys(manifest.client_state)],
        "bytes": sizes,
        "files": {name: entry.bytes for name, entry in manifest.files.items()},
    }


def describe(found: dict[str, Any]) -> str:
    """Return `facts` as text, a line for each that is there, and tables of bytes below them."""
    lines, tables = [], []
    for key, value in found.items():
        name = key.replace("_", " ")
        if isinstance(value, dict):
            sizes = (f"{size(each):>12}  {part}" for part, each in value.items())
            tables += ["", f"{name}:", *sizes]
        elif value or value == 0:
            shown = ", ".join(value) if isinstance(value, list) else value
            lines.append(f"{name:<20}{f'{shown:,}' if isinstance(shown, int) else shown}")
    return "\n".join(lines + tables)


def _keys(client_state: dict[str, Any]) -> Iterable[object]:
    if KIND not in client_state:
        return client_state
    from zero.checkpoint.values import decode  # here: few have other keys than texts

    return decode(client_state)
