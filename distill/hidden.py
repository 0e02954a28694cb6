"""Losses inside the models: on hidden states after learned projections, and on attention
relations (MiniLM).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cosine_similarity, mse_loss
from transformers import PretrainedConfig, PreTrainedModel

from distill.options import HIDDEN_LOSSES

# Names of the projections of query, key and value in an attention module, one row for each family
# of models.
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("query", "key", "value"))


class LayerPair(NamedTuple):
    """Indices into `hidden_states`: 0 is the embeddings, i is the output of layer i."""

    student: int
    teacher: int


def decoder_depth(config: PretrainedConfig) -> str | None:
    """Return the name of the number of the decoder's layers, if it has one of its own.

    T5 has `num_decoder_layers`; BART, Marian and NLLB have `decoder_layers`. A MiniCodformer's
    `decoder_layers` are only the last of its layers.
    """
    if config.model_type == "minicodformer":
        return None
    names = ("num_decoder_layers", "decoder_layers")
    return next((name for name in names if getattr(config, name, None) is not None), None)


def layers_and_width(config: PretrainedConfig) -> tuple[int, int]:
    """The number of layers of a model's decoder (of all if it has no encoder), and the width of
    their outputs.
    """
    text = config.get_text_config()
    name = decoder_depth(text)
    layers = getattr(text, name) if name else text.num_hidden_layers
    return layers, text.hidden_size


def parse_layer_mapping(
    text: str | None, student_layers: int, teacher_layers: int
) -> list[LayerPair]:
    """Parse pairs of layers such as "1:3,2:6". None: pair each student layer with the teacher's at
    the same depth.

    Raises:
        ValueError: a part is not a pair, or names a layer that does not exist.
    """
    if not text:
        step = teacher_layers / student_layers
        return [LayerPair(i, round(i * step)) for i in range(1, student_layers + 1)]
    pairs = []
    for part in text.split(","):
        student, _, teacher = part.strip().partition(":")
        if not (student.isdigit() and teacher.isdigit()):
            raise ValueError(
                f"layer_mapping {text!r}: {part!r} is not a pair; write student:teacher, such as "
                "1:3,2:6"
            )
        if int(student) > student_layers or int(teacher) > teacher_layers:
            raise ValueError(
                f"layer_mapping {text!r}: {part!r} names a layer that does not exist; the student "
                f"has 0 to {student_layers} and the teacher 0 to {teacher_layers} (0: the "
                "embeddings)"
            )
        pairs.append(LayerPair(int(student), int(teacher)))
    return pairs


def hidden_loss(student: torch.Tensor, teacher: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the sum over N tokens of mean squared error, or of 1 - cosine, of states (N, H), at
    least in fp32.

    Sources: arXiv 1909.10351 (squared error after a projection), 1910.01108 (cosine).
    """
    dtype = torch.promote_types(student.dtype, torch.float32)
    student, teacher = student.to(dtype), teacher.to(dtype)
    if kind == "cosine":
        return (1 - cosine_similarity(student, teacher, dim=-1)).sum()
    return mse_loss(student, teacher, reduction="none").mean(-1).sum()


class HiddenMatch(nn.Module):
    """Learned projections from the student's width to the teacher's, and the loss after them.

    It is a submodule of the student and is trained with it. It is never exported.
    """

    def __init__(
        self, pairs: Sequence[LayerPair], student_width: int, teacher_width: int, kind: str = "mse"
    ):
        super().__init__()
        if kind not in HIDDEN_LOSSES:
            raise ValueError(
                f"hidden_loss_type {kind!r} is unknown: choose one of {', '.join(HIDDEN_LOSSES)}"
            )
        self.pairs = list(pairs)
        self.kind = kind
        projections = [nn.Linear(student_width, teacher_width, bias=False) for _ in pairs]
        if student_width == teacher_width:
            for projection in projections:
                nn.init.eye_(projection.weight)
        self.projections = nn.ModuleList(projections)

    def forward(
        self,
        student: Sequence[torch.Tensor],
        teacher: Sequence[torch.Tensor],
        rows: torch.Tensor,
        teacher_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss, summed over tokens and averaged over pairs.

        States: (batch, length, width). rows: (N,).
        """
        total = student[0].new_zeros((), dtype=torch.float32)
        for pair, projection in zip(self.pairs, self.projections, strict=True):
            ours = projection(student[pair.student].flatten(0, 1)[rows])
            theirs = teacher[pair.teacher].flatten(0, 1)[teacher_rows].to(ours.device)
            total = total + hidden_loss(ours, theirs, self.kind)
        return total / len(self.pairs)


class Attention(NamedTuple):
    """The vectors of one attention layer, each (batch, length, width).

    Key and value may be narrower.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class AttentionRecorder:
    """Records queries, keys and values of a model's self-attention layers (of the decoder, if it
    has one).
    """

    def __init__(self, model: PreTrainedModel, whose: str, layers: Sequence[int]):
        """`layers`: the indices of those that will be recorded.

        ValueError if the model has no attention there.
        """
        self.modules = [
            found for module in model.modules() if (found := _projections_of(module)) is not None
        ]
        if getattr(model.config, "is_encoder_decoder", False):
            decoder = set(model.get_decoder().modules())
            self.modules = [found for found in self.modules if found[0] in decoder][
                ::2
            ]  # self- and cross-attention alternate
        if not self.modules:
            names = "; ".join(", ".join(names) for names in _PROJECTIONS)
            raise ValueError(
                f"attn_relation_weight: no attention layer of the {whose} has projections named "
                f"{names}; set it to 0"
            )
        if max(layers, default=0) >= len(self.modules):
            raise ValueError(
                f"attn_relation_weight: only {len(self.modules)} layers of the {whose} have "
                f"attention, not layer {max(layers) + 1}: name others with layer_mapping"
            )

    @contextmanager
    def recording(self, layers: Sequence[int]) -> Iterator[dict[int, Attention]]:
        """Yield a dict.

        A forward inside this context fills it, for the layers with these indices. An engine may
        run a batch in slices, and tries blocks without gradients first.
        """
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        recorded: dict[int, Attention] = {}
        trains = torch.is_grad_enabled()

        def keep(layer: int, part: int):
            def hook(_module: nn.Module, _args: tuple, output: torch.Tensor) -> None:
                if torch.is_grad_enabled() != trains:
                    return
                outputs[layer, part] = output
                if part == 2:
                    found = [outputs.pop((layer, i)) for i in range(3)]
                    if layer in recorded:
                        found = map(torch.cat, zip(recorded[layer], found, strict=True))
                    recorded[layer] = Attention(*found)

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
        found = [getattr(module, name, None) for name in names]
        projections = [each for each in found if isinstance(each, nn.Module)]
        if len(projections) == len(names):
            return tuple(projections)
    return None


def relation_heads(widths: Sequence[int], wanted: int) -> int:
    """Return the largest number of relation heads up to `wanted` that divides all widths."""
    common = math.gcd(*widths)
    return max(heads for heads in range(1, wanted + 1) if common % heads == 0)


def relation_loss(
    student: Attention, teacher: Attention, heads: int, visible: torch.Tensor
) -> torch.Tensor:
    """Return KL(teacher's relations || student's relations) of each token: (batch, length), arXiv
    2012.15828.

    A relation is softmax(X X' / sqrt(width of a head)) for X = queries, keys or values, split into
    `heads`. The loss is averaged over heads and the three kinds. `visible` (batch, length, length)
    bool: the tokens that a token may see. A token must see itself."""
    query, key, value = (
        _relation_divergence(ours, theirs.to(ours.device), heads, visible)
        for ours, theirs in zip(student, teacher, strict=True)
    )
    return (query + key + value) / 3


def _relation_divergence(
    student: torch.Tensor, teacher: torch.Tensor, heads: int, visible: torch.Tensor
) -> torch.Tensor:
    """Return KL(teacher || student) of the relations of one kind of vectors, (batch, length)."""
    log_q = _log_relations(student, heads, visible)
    log_p = _log_relations(teacher, heads, visible)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean(1)


def _log_relations(vectors: torch.Tensor, heads: int, visible: torch.Tensor) -> torch.Tensor:
    batch, length, width = vectors.shape
    split = (
        vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        .view(batch, length, heads, -1)
        .transpose(1, 2)
    )
    scores = split @ split.transpose(-1, -2) / math.sqrt(width / heads)
    # Not -inf: an invisible token has probability 0 in both, and 0 times a finite difference is 0.
    return torch.log_softmax(scores.masked_fill(~visible.unsqueeze(1), -1e4), dim=-1)
