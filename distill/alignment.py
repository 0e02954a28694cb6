"""One text read by two tokenizers: which tokens of one tokenizer come after the same text as which
tokens of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from distill.data import Segment, encode, start_tokens
from translation.records import InputError


def prefix_ends(
    segments: Sequence[Segment], tokenizer: PreTrainedTokenizerBase, length: int
) -> list[int]:
    """Return for each token of `encode(segments)` the bytes of text before it; -1 if these end
    within a character.

    The bytes are counted to the end of the token before. Starts of tokens cannot be compared,
    because tokenizers differ about the place of a leading space."""
    text = "".join(segment.text for segment in segments)
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = tokens["offset_mapping"]
    at_byte = [0, *accumulate(len(character.encode()) for character in text)]
    ends = [0] * (1 + len(start_tokens(segments, tokenizer)))
    for (_, end), following in zip(offsets, [*offsets[1:], None], strict=True):
        # True if the next token begins with the rest of a character.
        within = following is not None and following[0] < end
        ends.append(-1 if within else at_byte[end])
    return (ends + [-1] * length)[:length]


def encode_twice(
    segments: Sequence[Segment],
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    max_length: int,
) -> dict[str, list[int]]:
    """Encode with the student's tokenizer, and add `teacher_input_ids` and `teacher_positions` (see
    `Batch.of`).

    Raises:
        InputError: a tokenizer that gives no offsets.
    """
    for whose, tokenizer in (("student", student), ("teacher", teacher)):
        if not tokenizer.is_fast:
            raise InputError(
                f"loss_type uld needs the offset of each token in the text, and the {whose}'s "
                "tokenizer gives none: use a fast tokenizer"
            )
    ours, theirs = encode(segments, student), encode(segments, teacher)["input_ids"][:max_length]
    at = {
        end: index
        for index, end in enumerate(prefix_ends(segments, teacher, len(theirs)))
        if end >= 0
    }
    ends = prefix_ends(segments, student, len(ours["input_ids"]))
    positions = [at.get(end, -1) if end >= 0 else -1 for end in ends]
    return {
        **{name: values[:max_length] for name, values in ours.items()},
        "teacher_input_ids": theirs,
        "teacher_positions": positions[:max_length],
    }
