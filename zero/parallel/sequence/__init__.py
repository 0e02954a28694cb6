"""Ulysses sequence parallelism (arXiv 2309.14509): some ranks share each sequence, and its
activations.

Every rank has a piece of the sequence. Only attention needs all of it: there an all-to-all turns
[piece of the sequence, all heads] into [whole sequence, some heads], and another one turns the
result back. The engine knows nothing of this: it shards over all ranks, as ever."""

from zero.parallel.sequence.attention import attach as attach
from zero.parallel.sequence.attention import detach as detach
from zero.parallel.sequence.attention import is_shared_already as is_shared_already
from zero.parallel.sequence.batches import MicroBatches as MicroBatches
from zero.parallel.sequence.group import SequenceGroup as SequenceGroup
from zero.parallel.sequence.group import all_to_all as all_to_all
from zero.parallel.sequence.group import current_group as current_group
from zero.parallel.sequence.group import make_group as make_group
from zero.parallel.sequence.tiles import tile_mlps as tile_mlps
from zero.parallel.sequence.tiles import tiled as tiled
from zero.parallel.sequence.tiles import tiled_loss as tiled_loss
