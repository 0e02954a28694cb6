"""Compares the vocabularies of student and teacher: over which token ids their distributions can be
compared.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch

from distill.fused import SharedTokens

logger = logging.getLogger(__name__)

ADVICE = (
    "use a student with the teacher's tokenizer, or --loss_type uld, which aligns different "
    "tokenizers by bytes"
)


class VocabularyError(ValueError):
    """The vocabularies of student and teacher do not match.

    The message says why, and what to do.
    """


class Alignment(NamedTuple):
    """Which ids are compared. If both vocabularies are equal, all are None.

    shared: see `distill.fused.SharedTokens`. teacher_labels: (rows of the student,) teacher id of
    each student id, or -1. replacement: the id that the teacher reads in place of an id that it
    does not know."""

    shared: SharedTokens | None = None
    teacher_labels: torch.Tensor | None = None
    replacement: int | None = None


def align(
    student_tokens: Mapping[str, int],
    teacher_tokens: Mapping[str, int],
    student_rows: int,
    teacher_rows: int,
    policy: str = "common",
    replacement: int | None = None,
) -> Alignment:
    """Compare the token -> id maps of two tokenizers, and the rows of the models' heads.

    "strict" accepts only equal maps and equal rows. "common" accepts maps in which no id means two
    different tokens, and compares the distributions over the ids that both know, renormalised.
    Padded rows (151,936 or 152,064 rows for 151,669 tokens) therefore do not count. The teacher
    reads `replacement` in place of a token that it does not know.

    Raises:
        VocabularyError: an id means different tokens, or the policy is "strict" and anything
        differs.
    """
    student_of = {index: token for token, index in student_tokens.items() if index < student_rows}
    teacher_of = {index: token for token, index in teacher_tokens.items() if index < teacher_rows}
    shared = sorted(index for index, token in student_of.items() if teacher_of.get(index) == token)
    conflicts = [i for i, token in student_of.items() if i in teacher_of and teacher_of[i] != token]
    if conflicts or not shared:
        example = min(conflicts, default=None)
        what = (
            ""
            if example is None
            else f" (id {example} is {student_of[example]!r} and {teacher_of[example]!r})"
        )
        raise VocabularyError(
            f"student and teacher have different tokenizers: {len(conflicts)} ids mean different "
            f"tokens{what}; {ADVICE}"
        )
    if student_of == teacher_of and student_rows == teacher_rows:
        return Alignment()
    if policy == "strict":
        raise VocabularyError(
            f"vocab_policy strict: the student has {len(student_of)} tokens in {student_rows} "
            "rows, the teacher"
            f" {len(teacher_of)} in {teacher_rows}; use --vocab_policy common to compare the "
            f"{len(shared)} shared ones"
        )
    logger.info("distilling over the %d tokens that student and teacher share", len(shared))
    labels = torch.full((student_rows,), -1, dtype=torch.long)
    labels[shared] = torch.tensor(shared)
    prefix = shared[-1] == len(shared) - 1
    ids = slice(0, len(shared)) if prefix else torch.tensor(shared)
    unknown = len(shared) < len(student_of)
    if unknown and replacement is None:
        raise VocabularyError(
            f"the teacher does not know {len(student_of) - len(shared)} of the student's tokens "
            "and has no unknown or"
            f" end token to read in their place; set unk_token in its tokenizer"
        )
    return Alignment(SharedTokens(ids, ids), labels, replacement if unknown else None)


def align_rows(student_rows: int, teacher_rows: int) -> Alignment:
    """Return the alignment if no tokenizers are known: the first ids, up to the rows of the smaller
    head.
    """
    if student_rows == teacher_rows:
        return Alignment()
    rows = min(student_rows, teacher_rows)
    labels = torch.full((student_rows,), -1, dtype=torch.long)
    labels[:rows] = torch.arange(rows)
    return Alignment(
        SharedTokens(slice(0, rows), slice(0, rows)), labels, 0 if student_rows > rows else None
    )
