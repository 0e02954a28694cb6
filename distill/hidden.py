"""Losses on what is inside: hidden states through learned projections, and relations of attention vectors (MiniLM)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cosine_similarity, mse_loss

HIDDEN_LOSSES = ("mse", "cosine")
# The names of the projections of query, key and value in one attention module, by family.
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("query", "key", "value"))


class LayerPair(NamedTuple):
    """Indices into `hidden_states`: 0 are the embeddings, i is what layer i gives."""

    student: int
    teacher: int


def parse_layer_mapping(text: str | None, student_layers: int, teacher_layers: int) -> list[LayerPair]:
    """Pairs of layers from "1:3,2:6"; None: each student layer with the teacher's at the same fraction of its depth.

    Raises:
        ValueError: a pair that is no pair, or a layer that does not exist.
    """
    if not text:
        step = teacher_layers / student_layers
        return [LayerPair(i, round(i * step)) for i in range(1, student_layers + 1)]
    pairs = []
    for part in text.split(","):
        student, _, teacher = part.strip().partition(":")
        if not (student.isdigit() and teacher.isdigit()):
            raise ValueError(f"layer_mapping {text!r}: {part!r} is no pair; write student:teacher, such as 1:3,2:6")
        if int(student) > student_layers or int(teacher) > teacher_layers:
            raise ValueError(
                f"layer_mapping {text!r}: {part!r} names a layer that is not there; the student has 0 to"
                f" {student_layers} and the teacher 0 to {teacher_layers} (0: the embeddings)"
            )
        pairs.append(LayerPair(int(student), int(teacher)))
    return pairs


def hidden_loss(student: torch.Tensor, teacher: torch.Tensor, kind: str) -> torch.Tensor:
    """The sum over N tokens of the mean squared error, or of 1 - cosine, of states (N, H), in fp32 at least.

    Sources: arXiv 1909.10351 (squared error after a projection), 1910.01108 (cosine).
    """
    dtype = torch.promote_types(student.dtype, torch.float32)
    student, teacher = student.to(dtype), teacher.to(dtype)
    if kind == "cosine":
        return (1 - cosine_similarity(student, teacher, dim=-1)).sum()
    return mse_loss(student, teacher, reduction="none").mean(-1).sum()


class HiddenMatch(nn.Module):
    """Learned projections from the student's states to the teacher's width, and the loss after them.

    It is trained with the student, as a submodule of it, and is never exported.
    """

    def __init__(self, pairs: Sequence[LayerPair], student_width: int, teacher_width: int, kind: str = "mse"):
        super().__init__()
        if kind not in HIDDEN_LOSSES:
            raise ValueError(f"hidden_loss_type {kind!r} is unknown: choose one of {', '.join(HIDDEN_LOSSES)}")
        self.pairs, self.kind = list(pairs), kind
        self.projections = nn.ModuleList(nn.Linear(student_width, teacher_width, bias=False) for _ in pairs)
        if student_width == teacher_width:
            for projection in self.projections:
                nn.init.eye_(projection.weight)

    def forward(
        self,
        student: Sequence[torch.Tensor],
        teacher: Sequence[torch.Tensor],
        rows: torch.Tensor,
        teacher_rows: torch.Tensor,
    ) -> torch.Tensor:
        """The loss summed over tokens, averaged over pairs. States are (batch, length, width), rows index tokens."""
        total = student[0].new_zeros((), dtype=torch.float32)
        for pair, projection in zip(self.pairs, self.projections, strict=True):
            ours = projection(student[pair.student].flatten(0, 1)[rows])
            theirs = teacher[pair.teacher].flatten(0, 1)[teacher_rows].to(ours.device)
            total = total + hidden_loss(ours, theirs, self.kind)
        return total / len(self.pairs)


class Attention(NamedTuple):
    """The vectors of one attention layer, (batch, length, width) each; widths of key and value may be smaller."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class AttentionRecorder:
    """Records queries, keys and values of a model's self-attention layers in `layers` (indices of its attentions)."""

    def __init__(self, model: nn.Module, whose: str):
        self.modules = [found for module in model.modules() if (found := _projections_of(module)) is not None]
        if getattr(model.config, "is_encoder_decoder", False):
            decoder = set(model.get_decoder().modules())
            self.modules = [found for found in self.modules if found[0] in decoder][::2]  # self- and cross- in turn
        if not self.modules:
            names = "; ".join(", ".join(names) for names in _PROJECTIONS)
            raise ValueError(
                f"attn_relation_weight: no attention layer of the {whose} has projections named {names}; set it to 0"
            )

    @contextmanager
    def recording(self, layers: Sequence[int]) -> Iterator[dict[int, Attention]]:
        """While it lasts, a forward fills the dict that is yielded."""
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        recorded: dict[int, Attention] = {}

        def keep(layer: int, part: int):
            def hook(_module: nn.Module, _args: tuple, output: torch.Tensor) -> None:
                outputs[layer, part] = output
                if part == 2:
                    recorded[layer] = Attention(*(outputs.pop((layer, i)) for i in range(3)))

            return hook

        handles = [
            module.register_forward_hook(keep(layer, part))
            for layer in set(layers)
            for part, module in enumerate(self.modules[layer])
        ]
        try:
            yield recorded
        finally:
            for handle in handles:
                handle.remove()


def _projections_of(module: nn.Module) -> tuple[nn.Module, ...] | None:
    for names in _PROJECTIONS:
        found = tuple(getattr(module, name, None) for name in names)
        if all(isinstance(projection, nn.Module) for projection in found):
            return found
    return None


def relation_heads(widths: Sequence[int], wanted: int) -> int:
    """The largest number of relation heads, at most `wanted`, that divides all widths."""
    common = math.gcd(*widths)
    return max(heads for heads in range(1, wanted + 1) if common % heads == 0)


def relation_loss(student: Attention, teacher: Attention, heads: int, visible: torch.Tensor) -> torch.Tensor:
    """KL of the teacher's relations from the student's, of each token: (batch, length), arXiv 2012.15828.

    A relation is softmax(X X' / sqrt(width of a head)) for X = queries, keys and values, split into `heads`; the loss
    is averaged over heads and the three kinds. `visible` (batch, length, length) bool says which tokens a token may
    see; it must see itself.
    """
    total = 0.0
    for ours, theirs in zip(student, teacher, strict=True):
        log_q, log_p = _log_relations(ours, heads, visible), _log_relations(theirs.to(ours.device), heads, visible)
        total = total + (log_p.exp() * (log_p - log_q)).sum(-1).mean(1)
    return total / 3


def _log_relations(vectors: torch.Tensor, heads: int, visible: torch.Tensor) -> torch.Tensor:
    batch, length, width = vectors.shape
    split = vectors.to(torch.promote_types(vectors.dtype, torch.float32)).view(batch, length, heads, -1).transpose(1, 2)
    scores = split @ split.transpose(-1, -2) / math.sqrt(width / heads)
    # Finite: an invisible token has probability 0 in both, and 0 times a finite difference is 0.
    return torch.log_softmax(scores.masked_fill(~visible.unsqueeze(1), -1e4), dim=-1)
