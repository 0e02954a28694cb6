"""The losses between layers of student and teacher: which layers are compared, what a forward must
record for it, and the sums over a batch. The formulas are in `distill.hidden`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from distill.batch import Batch
from distill.config import DistillationConfig
from distill.hidden import (
    Attention,
    AttentionRecorder,
    HiddenMatch,
    layers_and_width,
    parse_layer_mapping,
    relation_heads,
    relation_loss,
)
from distill.teacher import Observed

# Name of the submodule of the student that is trained with it and never exported.
PROJECTIONS = "distillation"


class LayerLosses:
    """Compares the hidden states and attention relations of a student with its teacher's.

    Attributes: matches_hidden: whether hidden states are compared. If so, the student has got the
    projections as its submodule `PROJECTIONS`. teacher_recorder, teacher_layers: what the teacher
    must record for the attention relations.
    """

    def __init__(
        self, student: PreTrainedModel, teacher: PreTrainedModel, args: DistillationConfig
    ):
        self.matches_hidden = args.hidden_loss_weight > 0
        self._compared: tuple[Batch, Observed] | None = None
        student_layers, student_width = layers_and_width(student.config)
        teacher_layers, teacher_width = layers_and_width(teacher.config)
        pairs = parse_layer_mapping(args.layer_mapping, student_layers, teacher_layers)
        if self.matches_hidden:
            match = HiddenMatch(pairs, student_width, teacher_width, args.hidden_loss_type)
            student.add_module(PROJECTIONS, match.to(device=student.device, dtype=torch.float32))
            # The projections run inside the student's forward, because DDP and engines expect
            # all parameters there.
            student.register_forward_hook(self._add_hidden_loss)
        self._attention_pairs = [pair for pair in pairs if pair.student and pair.teacher]
        self._heads = student.config.get_text_config().num_attention_heads
        self._student_recorder: AttentionRecorder | None = None
        self.teacher_recorder: AttentionRecorder | None = None
        self._student_layers = [pair.student - 1 for pair in self._attention_pairs]
        self.teacher_layers = [pair.teacher - 1 for pair in self._attention_pairs]
        if args.attn_relation_weight:
            self._student_recorder = AttentionRecorder(student, "student", self._student_layers)
            self.teacher_recorder = AttentionRecorder(teacher, "teacher", self.teacher_layers)

    @contextmanager
    def recording(self, batch: Batch, observed: Observed) -> Iterator[Mapping[int, Attention]]:
        """Record what the losses need of the student's forward in this context.

        The forward's output gets the key `hidden_loss`. Yields the student's attention by layer.
        """
        self._compared = (batch, observed) if self.matches_hidden else None
        recording = nullcontext({})
        if self._student_recorder is not None:
            recording = self._student_recorder.recording(self._student_layers)
        try:
            with recording as attentions:
                yield attentions
        finally:
            self._compared = None

    def _add_hidden_loss(
        self, student: nn.Module, args: tuple[Any, ...], output: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Forward hook of the student."""
        if self._compared is None:
            return output
        batch, observed = self._compared
        match = student.get_submodule(PROJECTIONS)
        states = output.get("decoder_hidden_states") or output["hidden_states"]
        observed.stream.wait()
        loss = match(states, observed.hidden_states, batch.rows, batch.teacher_rows)
        # A plain dict: DDP rebuilds the output, and transformers' output classes would refuse the
        # new key then.
        return {**output, "hidden_loss": loss}

    def relation_loss(
        self, batch: Batch, student: Mapping[int, Attention], teacher: Mapping[int, Attention]
    ) -> torch.Tensor:
        """Return the loss on attention relations, summed over the targets of the batch and averaged
        over the pairs of layers (arXiv 2012.15828). The maps give the attention by layer.
        """
        total = torch.zeros((), device=batch.labels.device)
        if self._student_recorder is None:
            return total
        visible = batch.visible()
        for pair in self._attention_pairs:
            ours, theirs = student[pair.student - 1], teacher[pair.teacher - 1]
            heads = relation_heads([part.shape[-1] for part in (*ours, *theirs)], self._heads)
            of_tokens = relation_loss(ours, theirs, heads, visible).flatten()[batch.rows]
            total = total + of_tokens.sum() / len(self._attention_pairs)
        return total
