"""Parameters that are cut over a model group (tensor parallelism): their parts in a checkpoint, and
how to join them.

    weights/NAME@I         part I of NAME, flattened; the manifest says along which dimension NAME
                           was cut
    optimizer/KEY/NAME@I   the same of an optimizer state

A run whose model is cut in the same way reads its parts. Any other one reads all parts, one
parameter at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero.checkpoint.files import SliceReader, Slices, whole
from zero.core.param_group import ParamGroup
from zero.core.sharded_param import Cut, cut_of, is_copy


def name_in(key: str) -> str:
    """The parameter that the key of a tensor in a checkpoint is about."""
    return key.removeprefix("weights/") if key.startswith("weights/") else key.split("/", 2)[-1]


def cuts_of(groups: Sequence[ParamGroup]) -> dict[str, Cut]:
    """How the parameters are cut, by name."""
    named = (pair for group in groups for pair in zip(group.param_names, group.params, strict=True))
    return {name: cut for name, param in named if (cut := cut_of(param)) is not None}


def to_store(slices: dict[str, Slices], groups: Sequence[ParamGroup]) -> dict[str, Slices]:
    """What this rank saves of `slices`: its parts under their own keys, and nothing that another
    rank saves.
    """
    named = [pair for group in groups for pair in zip(group.param_names, group.params, strict=True)]
    copies, cuts = {name for name, param in named if is_copy(param)}, cuts_of(groups)
    found = {}
    for key, entry in slices.items():
        name = name_in(key)
        if name not in copies:
            found[f"{key}@{cuts[name].index}" if name in cuts else key] = entry
    return found


def join(parts: Sequence[torch.Tensor], shape: torch.Size, dim: int, blocks: int) -> torch.Tensor:
    """The whole of `shape` from its parts (1-D).

    It has `blocks` along `dim`; each part has its pieces of them all.
    """
    before, after = shape[:dim], shape[dim + 1 :]
    return torch.cat([part.view(*before, blocks, -1, *after) for part in parts], dim=dim + 1).view(
        shape
    )


class PartReader(SliceReader):
    """A `SliceReader` for which the tensors of cut parameters are whole, unless `cuts` asks for a
    part of them.
    """

    def __init__(self, *args: object, cuts: dict[str, Cut] | None = None):
        super().__init__(*args)
        self._cuts = cuts or {}

    def stored_cut(self, key: str) -> list[int] | None:
        """How the tensor of this key was cut when it was saved: (dimension, blocks, parts)."""
        entry = self.manifest.parameters.get(name_in(key))
        return None if entry is None else entry.cut

    def holds(self, key: str) -> bool:
        return super().holds(key if self.stored_cut(key) is None else f"{key}@0")

    def dtype(self, key: str) -> torch.dtype:
        return super().dtype(key if self.stored_cut(key) is None else f"{key}@0")

    def check(self, key: str, numel: int) -> None:
        if key in self.tensors or self.stored_cut(key) is None:
            super().check(key, numel)

    def read(self, slices: dict[str, Slices]) -> None:
        as_stored, others = {}, {}
        for key, entry in slices.items():
            stored, cut = self.stored_cut(key), self._cuts.get(name_in(key))
            if stored == (cut and cut.described):
                as_stored[key if cut is None else f"{key}@{cut.index}"] = entry
            else:
                others[key] = entry
        super().read(as_stored)
        for key, entry in others.items():
            values, cut = self._joined(key), self._cuts.get(name_in(key))
            values = (values if cut is None else cut.of(values)).reshape(-1)
            for start, part in entry.parts.items():
                part.copy_(values[start : start + part.numel()])

    def _joined(self, key: str) -> torch.Tensor:
        """All of a tensor, in host memory."""
        shape, stored = (
            torch.Size(self.manifest.parameters[name_in(key)].shape),
            self.stored_cut(key),
        )
        keys = [key] if stored is None else [f"{key}@{index}" for index in range(stored[-1])]
        if missing := [each for each in keys if each not in self.tensors]:
            raise ValueError(f"the checkpoint has no {missing[0]}")
        parts = [
            torch.empty(
                self.tensors[each].numel, dtype=super(PartReader, self).dtype(each), device="cpu"
            )
            for each in keys
        ]
        super().read({each: whole(part) for each, part in zip(keys, parts, strict=True)})
        return parts[0].view(shape) if stored is None else join(parts, shape, *stored[:2])
