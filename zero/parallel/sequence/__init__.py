"""Ulysses sequence parallelism (arXiv 2309.14509): some ranks share each sequence, and its
activations.

Every rank has a piece of the sequence. Only attention needs all of it: there an all-to-all turns
[piece of the sequence, all heads] into [whole sequence, some heads], and another one turns the
result back. The engine knows nothing of this: it shards over all ranks, as ever."""

from zero.parallel.sequence.attention import attach, detach, is_shared_already
from zero.parallel.sequence.batches import MicroBatches
from zero.parallel.sequence.group import SequenceGroup, all_to_all, current_group, make_group
from zero.parallel.sequence.tiles import tile_mlps, tiled, tiled_loss

__all__ = [
    "MicroBatches",
    "SequenceGroup",
    "all_to_all",
    "attach",
    "current_group",
    "detach",
    "is_shared_already",
    "make_group",
    "tile_mlps",
    "tiled",
    "tiled_loss",
]
