"""Which blocks of a model run their batch in slices, and in how many."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal

from torch import nn

from zero.config import Config
from zero.core.layout import called_blocks
from zero.errors import UsageError
from zero.slicing.blocks import RECORDER, Agree, SlicedBlock
from zero.slicing.head import sliced_head
from zero.slicing.known import why_not_sliced


class BatchSlices:
    """The slices of one engine: those of its blocks' batches, and the chunks of its head's tokens.

    Args:
        steps: counts the steps of the optimizer.
        agree: see `SlicedBlock`.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Config,
        steps: Callable[[], int],
        agree: Agree | None = None,
    ):
        self._model = model
        self._agree = agree
        self._kept = settings.activation_checkpointing
        self._blocks: list[SlicedBlock] = []
        is_wanted = self._kept.batch_slices not in (None, 1)
        # What is gathered when must stay the same when slices are asked for later.
        adapts = settings.on_out_of_memory == "adapt"
        self._head = sliced_head(model, steps, is_wanted) if is_wanted or adapts else None

    def begin(self) -> None:
        """Run the slices that the configuration asks for, if it does. Raises UsageError if the
        model has no blocks that can run in them; `remove` must follow in any case.
        """
        wanted = self._kept.batch_slices
        if wanted is None or wanted == 1:
            return
        if why := self._why_no_blocks():
            raise UsageError(f"activation_checkpointing.batch_slices: {why}")
        self._slice(wanted)
        self.refine(1)

    @property
    def samples(self) -> int:
        """How large a block's batch was at most; 2 if it is not known."""
        return max((block.samples for block in self._blocks), default=2)

    @property
    def number(self) -> int:
        """In how many slices a block has run its batch at most."""
        return max((block.number for block in self._blocks), default=1)

    def refine(self, least: int) -> None:
        """From now on, run at least so many slices."""
        if not self._blocks:
            self._slice(least)
        for block in self._blocks:
            block.least = least
        if self._head is not None:
            self._head.refine(least)

    def why_not(self) -> str:
        """Say why `refine` cannot be called; empty if it can."""
        if self._blocks:
            return ""
        for block in called_blocks(self._model):
            if why := "" if self._kept.trust_slices else why_not_sliced(block):
                return f"a block {why}"
        return self._why_no_blocks()

    def remove(self) -> None:
        """Restore the forwards of the blocks and the head."""
        for block in self._blocks:
            block.remove()
        if self._head is not None:
            self._head.remove()

    def _slice(self, slices: int | Literal["auto"]) -> None:
        names = {module: name for name, module in self._model.named_modules()}
        is_away = self._kept.cpu_checkpointing or self._kept.nvme_path
        blocks = called_blocks(self._model)
        for block in blocks:
            of = 0 if self._blocks or is_away else len(blocks)  # the first block speaks for all
            trusted = self._kept.trust_slices
            self._blocks.append(SlicedBlock(block, names[block], slices, trusted, of, self._agree))

    def _why_no_blocks(self) -> str:
        if not called_blocks(self._model):
            return (
                "the model has no blocks that could run in slices, neither `_no_split_modules` nor "
                "modules in an nn.ModuleList"
            )
        config = getattr(self._model, "config", None)
        for flag in ("output_router_logits", "output_attentions"):
            if getattr(config, flag, False) and RECORDER not in sys.modules:
                return (
                    "with this release, transformers collects tensors inside of blocks, where it "
                    f"would find one for each slice: set config.{flag} to false, or install "
                    "transformers 5"
                )
        return ""
