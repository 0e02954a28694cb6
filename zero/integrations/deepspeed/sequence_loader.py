"""DeepSpeed's adapter of data loaders for sequence parallelism.

It alone imports accelerate, when it is first used.
"""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import DataLoaderShard

from zero.errors import UsageError
from zero.parallel.sequence import MicroBatches, current_group


class UlyssesSPDataLoaderAdapter(DataLoaderShard):
    """A data loader of `zero.parallel.sequence.MicroBatches` of `dl`.

    A loader of accelerate's class: `skip_first_batches`, by which a Trainer resumes, keeps what it
    is. The arguments after the first have no effect: the group that was made last is used."""

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any):
        if (ranks := current_group()) is None:
            call = "UlyssesSPAttentionHF.register_with_transformers"
            raise UsageError(f"there is no sequence-parallel group: call {call}")
        super().__init__(MicroBatches(dl, ranks), batch_size=None)
