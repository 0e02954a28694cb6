"""Splits the batches of each rank's data loader into parts of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils.data import IterableDataset

from zero.errors import UsageError
from zero.parallel.sequence.group import IGNORED, SequenceGroup

Batch = dict[str, Any]
# What is added at the end of a sequence whose length the number of ranks does not divide; zeros
# elsewhere. No token attends to a later one, so nothing before it changes.
_FILLING = {"shift_labels": IGNORED}
# Facts about packed sequences as a whole, which transformers finds in `position_ids` too.
_DERIVED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


class MicroBatches(IterableDataset):
    """Splits each batch of each rank's loader along the sequence, so that every rank of the group
    gets a part of it.

    One batch of every rank's loader makes `ranks.size` micro-batches here: the first is the batch
    of the group's first rank, and so on. An epoch ends where the first loader ends.

    A batch is a mapping. Its tensors are (batch, sequence, ...); other values are passed on.
    `labels` are replaced by `shift_labels`: those of the next token, because that may lie in the
    next piece. `position_ids` are added if they are missing, and what follows from them is left out
    (`cu_seq_lens_q` and the like). A sequence is filled up to a multiple of `ranks.size`; what is
    added counts nowhere.

    Raises UsageError, naming the key, for a tensor without the sequence's length.
    """

    def __init__(self, loader: Any, ranks: SequenceGroup):
        super().__init__()
        self.loader = loader
        self.ranks = ranks

    def __len__(self) -> int:
        return len(self.loader) * self.ranks.size

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the loader again, if it can."""
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        while True:
            pieces = self._exchange(partial(next, batches, None))
            if pieces is None:
                return
            yield from pieces

    def _complete(self, batch: Mapping[str, Any]) -> Batch:
        """The batch as the ranks split it: on the host, with shifted labels and positions, and of a
        length that their number divides.
        """
        batch = {key: value for key, value in batch.items() if key not in _DERIVED}
        if "input_ids" not in batch:
            raise UsageError(
                f"sequence parallelism: a batch needs 'input_ids'; this one has {sorted(batch)}"
            )
        ids = batch["input_ids"]
        if "position_ids" not in batch:
            positions = torch.arange(ids.shape[1], device=ids.device)
            batch["position_ids"] = positions.expand(ids.shape[:2])
        if "labels" in batch:
            labels = batch.pop("labels")
            batch.setdefault("shift_labels", pad(labels[:, 1:], (0, 1), value=IGNORED))
        for key, value in batch.items():
            if not isinstance(value, torch.Tensor):
                continue
            if value.shape[:2] != ids.shape[:2]:
                raise UsageError(
                    f"sequence parallelism: {key!r} of shape {tuple(value.shape)} cannot be split "
                    "along the sequence: "
                    f"'input_ids' is {tuple(ids.shape)}; leave it out of the batch"
                )
            batch[key] = _fill(key, value, -ids.shape[1] % self.ranks.size).cpu()
        return batch

    def _exchange(self, load: Callable[[], Mapping[str, Any] | None]) -> list[Batch] | None:
        """This rank's piece of each rank's batch. None if a loader has ended. An error of one
        rank's loader is raised on all ranks of the group, which would wait for its batch.

        Batches are sent whole: they are small beside what a model computes with them.
        """
        own: Any = None
        failure: Exception | None = None
        try:
            if (batch := load()) is not None:
                own = self._complete(batch)
        except Exception as error:
            own, failure = f"{type(error).__name__}: {error}", error
        batches: list[Any] = self.ranks.all_gather_objects(own)
        if failure is not None:
            raise failure
        if found := [each for each in batches if isinstance(each, str)]:
            raise RuntimeError(f"another rank of the sequence could not load its batch: {found[0]}")
        if None in batches:
            return None
        return [{key: self._piece(value) for key, value in each.items()} for each in batches]

    def _piece(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        piece = value.chunk(self.ranks.size, dim=1)[self.ranks.rank]
        return piece.contiguous().to(self.ranks.device)


def _fill(key: str, value: torch.Tensor, missing: int) -> torch.Tensor:
    """`value`, with `missing` more places along dimension 1."""
    if not missing:
        return value
    if key == "position_ids":
        more = torch.arange(1, missing + 1, device=value.device)
        return torch.cat([value, value[:, -1:] + more], dim=1)
    return pad(value, (0, 0) * (value.dim() - 2) + (0, missing), value=_FILLING.get(key, 0))
