"""Tensors in files whose values are read part by part, when they are needed."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from zero.checkpoint import disk
from zero.checkpoint.files import bytes_of
from zero.checkpoint.manifest import STORABLE
from zero.errors import UsageError

_DTYPES = {name: getattr(torch, dtype) for dtype, name in STORABLE.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor in files. `read(start, end)` returns these elements of the flattened tensor, 1-D, on
    the host and in `dtype`. It may be called from several threads.

    Attributes and methods have the names of a tensor's, so that `zero.checkpoint.files.write` takes
    it as the values of a slice.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Stored:
        flat = tensor.detach().cpu().contiguous().view(-1)
        return cls(tuple(tensor.shape), tensor.dtype, lambda start, end: flat[start:end])

    @classmethod
    def at(cls, path: Path, position: int, shape: Sequence[int], dtype: torch.dtype) -> Stored:
        """Return the tensor that begins at this position of a file."""

        def read(start: int, end: int) -> torch.Tensor:
            values = torch.empty(end - start, dtype=dtype, device="cpu")
            with open(disk.open_regular(path.resolve()), "rb", buffering=0) as file:
                place = position + start * dtype.itemsize
                if not disk.read_into(file.fileno(), bytes_of(values), place):
                    raise UsageError(f"{path} became shorter while it was read")
            return values

        return cls(tuple(shape), dtype, read)

    @classmethod
    def joined(cls, pieces: Sequence[Stored], shape: Sequence[int]) -> Stored:
        """Return the tensor whose elements are those of the pieces, which must be of one dtype."""
        starts = list(accumulate((each.numel() for each in pieces), initial=0))
        dtype = pieces[0].dtype

        def read(start: int, end: int) -> torch.Tensor:
            found = []
            for index in range(max(bisect_right(starts, start) - 1, 0), len(pieces)):
                first, most = starts[index], pieces[index].numel()
                if first >= end:
                    break
                found.append(pieces[index].read(max(start - first, 0), min(end - first, most)))
            return torch.cat(found) if found else torch.empty(0, dtype=dtype, device="cpu")

        return cls(tuple(shape), dtype, read)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel() * self.itemsize

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def __getitem__(self, part: slice) -> Stored:
        """Return a range of the flattened tensor."""
        start, end, _ = part.indices(self.numel())
        shape = torch.Size((end - start,))
        return Stored(shape, self.dtype, lambda first, last: self.read(start + first, start + last))

    def values(self) -> torch.Tensor:
        """Return the flattened tensor."""
        return self.read(0, self.numel())

    def tensor(self) -> torch.Tensor:
        return self.values().view(self.shape)


def tensors_of(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file. Raises UsageError, which names the file, if it is
    damaged.

    safetensors' own reader is not used for the values, because the pages that it maps count as this
    process's memory.
    """
    try:
        with safe_open(path, framework="pt"):  # checks the header against the file
            pass
    except SafetensorError as error:
        raise UsageError(f"{path} is damaged ({error}): copy it again") from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise UsageError(f"{path}: {name} has the dtype {entry['dtype']}, which torch lacks")
    return {
        name: Stored.at(
            path, 8 + length + entry["data_offsets"][0], entry["shape"], _DTYPES[entry["dtype"]]
        )
        for name, entry in header.items()
    }
