"""DeepSpeed's adapter of data loaders for sequence parallelism.

It alone imports accelerate, when it is first used.
"""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import DataLoaderShard

from zero.integrations.deepspeed.sequence import sequence_group
from zero.parallel.sequence import MicroBatches


class UlyssesSPDataLoaderAdapter(DataLoaderShard):
    """A data loader of `zero.parallel.sequence.MicroBatches` of `dl`.

    A loader of accelerate's class: `skip_first_batches`, by which a Trainer resumes, keeps what it
    is. The arguments after the first have no effect: the group that was made last is used."""

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any):
        super().__init__(MicroBatches(dl, sequence_group()), batch_size=None)
