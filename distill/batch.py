"""The parts of a batch: the inputs of student and teacher, and the tokens that have a target."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

IGNORED = -100
_READ_BY_MODELS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
)
_TEACHER = "teacher_"
# Key of a batch, written by `distill.data.CountingCollator`: the number of targets of each example,
# on the host.
TARGET_COUNTS = "target_counts"


def target_mask(labels: torch.Tensor, shifted: bool) -> torch.Tensor:
    """Return (batch, length) bool: positions whose output predicts a label.

    `shifted`: position t predicts t + 1.
    """
    mask = labels != IGNORED
    return pad(mask[:, 1:], (0, 1)) if shifted else mask


class _EncoderDecoder(Protocol):
    """What transformers' encoder-decoder models have, and PreTrainedModel does not declare."""

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor: ...


def with_decoder_inputs(inputs: Mapping[str, Any], model: PreTrainedModel) -> Mapping[str, Any]:
    """Return the inputs of `model`. Encoder-decoder models also get `decoder_input_ids`, which are
    made from the labels.
    """
    if not model.config.is_encoder_decoder or "decoder_input_ids" in inputs:
        return inputs
    ids = cast(_EncoderDecoder, model).prepare_decoder_input_ids_from_labels(inputs["labels"])
    return {**inputs, "decoder_input_ids": ids}


@dataclass
class Batch:
    """The N tokens with a target among (batch, length) positions.

    Attributes: student, teacher: the models' inputs. rows: (N,) position of each target's
    prediction in the student's flattened batch. labels: (N,). examples: (N,) the example that each
    belongs to. size: number of examples. teacher_rows: (N,) as `rows`, in the teacher's flattened
    batch. has_teacher: (N,) bool; None: the teacher has all."""

    student: dict[str, torch.Tensor]
    teacher: dict[str, torch.Tensor]
    rows: torch.Tensor
    labels: torch.Tensor
    examples: torch.Tensor
    size: int
    teacher_rows: torch.Tensor
    has_teacher: torch.Tensor | None = None

    @classmethod
    def of(cls, inputs: Mapping[str, Any], shifted: bool, isolates: bool = True) -> Batch:
        """Make a batch from `inputs`. As in transformers, a label of -100 means that there is no
        target.

        If the teacher has another tokenizer, `teacher_input_ids` and `teacher_attention_mask` are
        the same text in its tokens. `teacher_positions` (batch, length) has for each label the
        position of the teacher's token that begins at the same place of the text, or -1 if none
        begins there.

        `isolates`: whether the models keep packed documents apart. If not, each document gets a row
        of its own in their inputs, so packed documents have the same targets either way.

        The shape of `rows` depends on the labels. With `target_counts` (one integer per example),
        the host knows it already; without, it waits until the device has counted."""
        labels = inputs["labels"]
        mask = target_mask(labels, shifted).flatten()
        counts = inputs.get(TARGET_COUNTS)
        rows = mask.nonzero() if counts is None else torch.nonzero_static(mask, size=sum(counts))
        rows = rows.squeeze(-1)
        length = labels.shape[1]
        label_rows = rows + 1 if shifted else rows
        student = {name: inputs[name] for name in _READ_BY_MODELS if inputs.get(name) is not None}
        teacher, teacher_rows, has_teacher = student, rows, None
        if "teacher_positions" in inputs:
            teacher = {name: inputs[_TEACHER + name] for name in ("input_ids", "attention_mask")}
            positions = inputs["teacher_positions"].flatten()[label_rows]
            has_teacher = positions >= int(shifted)
            width = teacher["input_ids"].shape[1]
            teacher_rows = (rows // length) * width + (positions - int(shifted)).clamp_min(0)
        examples = rows // length
        if "position_ids" in student and not isolates:
            student, rows = _unpacked(student["input_ids"], student["position_ids"], rows)
            teacher, teacher_rows = student, rows
        return cls(
            student,
            teacher,
            rows,
            labels.flatten()[label_rows],
            examples,
            len(labels),
            teacher_rows,
            has_teacher,
        )

    def visible(self) -> torch.Tensor:
        """Return (batch, length, length) bool: the tokens that each token of a causal model or
        decoder may see.
        """
        read = self.student
        ids = read.get("decoder_input_ids", read["input_ids"])
        length = ids.shape[1]
        visible = (
            torch.ones(length, length, dtype=torch.bool, device=ids.device)
            .tril()
            .expand(len(ids), -1, -1)
        )
        if "position_ids" in read and "decoder_input_ids" not in read:
            document = (read["position_ids"] == 0).cumsum(-1)
            visible = visible & (document.unsqueeze(1) == document.unsqueeze(2))
        if "attention_mask" in read and "decoder_input_ids" not in read:
            here = torch.eye(length, dtype=torch.bool, device=ids.device)
            visible = visible & (read["attention_mask"].bool().unsqueeze(1) | here)
        return visible


def _unpacked(
    ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the inputs of a model for packed documents, padded to (documents, longest), and where
    `rows` of the packed batch are in them.
    """
    positions = positions.flatten()
    document = (positions == 0).cumsum(0) - 1
    longest = int(positions.max()) + 1
    padded = ids.new_zeros(int(document[-1]) + 1, longest)
    mask = torch.zeros_like(padded)
    padded[document, positions] = ids.flatten()
    mask[document, positions] = 1
    return {"input_ids": padded, "attention_mask": mask}, (document * longest + positions)[rows]


@torch.no_grad()
def isolates_documents(model: nn.Module, device: torch.device, whose: str) -> bool:
    """Whether packed documents do not see each other in a causal model. If they do, log it.

    Many models read the borders of documents from `position_ids`; OPT, BLOOM, Mamba and others do
    not. This is tested with two blocks of which only the first document differs.
    """
    ids = torch.tensor([[1, 2, 3, 4, 5], [3, 3, 1, 4, 5]], device=device)
    positions = torch.tensor([[0, 1, 2, 0, 1]] * 2, device=device)
    training = model.training
    model.eval()
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    model.train(training)
    one, other = logits[:, 3:].float()
    tolerance = min(torch.finfo(logits.dtype).eps ** 0.5, 0.01) * one.abs().max()
    isolates = bool((one - other).abs().max() <= tolerance)
    if not isolates:
        logger.warning(
            "the %s lets packed documents see each other, so each is padded instead", whose
        )
    return isolates
