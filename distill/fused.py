"""The fused, chunked head: the loss of a student's hidden states without a (tokens x vocabulary)
tensor.

[Note: what is in memory] Whole logits need about eight tensors of tokens x vocabulary for forward
KL, and fourteen for JSD. Here, forward takes one chunk of tokens at a time: it multiplies by both
heads, takes the softmax in fp32, computes the closed-form gradient dz on the logits, and multiplies
it back:

    d hidden[chunk] = dz @ W            d W += dz.T @ hidden[chunk]            only (chunk, V)
                                        exists, never (N, V)

Backward multiplies these results, (N, H) and (V, H), by the incoming scalar. Weights are therefore
needed in forward only, and an engine may reshard the head before backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from distill.losses import (
    LOG_ZERO,
    Bins,
    Divergence,
    log_probabilities,
    top_k_with_tail,
    value_and_gradient,
)

# Elements of one (chunk, V) tensor, if `chunk_size` is not given. About eight of them exist at a
# time. In fp32 one has 16 MiB on a CPU, where smaller ones update the head's gradient too often,
# and 256 MiB on an accelerator, where small products are slow.
CHUNK_ELEMENTS = {"cpu": 2**22}
CHUNK_ELEMENTS_ELSEWHERE = 2**26


class Teacher(Protocol):
    """The teacher's predictions for the N tokens."""

    def chunk(self, rows: slice) -> torch.Tensor | StoredChunk:
        """Return logits (chunk, teacher vocabulary) in any dtype, or the rows that a cache has
        stored.
        """
        ...


class StoredChunk(NamedTuple):
    """Rows of a teacher cache: bins at the stored temperature, and the teacher's own
    cross-entropy.
    """

    bins: Bins
    cross_entropy: torch.Tensor


class SharedTokens(NamedTuple):
    """Ids of the S tokens that both models know, in the same order: (S,) each, or slices of equal
    length.
    """

    student: torch.Tensor | slice
    teacher: torch.Tensor | slice


@dataclass(frozen=True)
class Recipe:
    """How the loss of a token is computed.

    Args:
        kd_alpha: loss = (1 - kd_alpha) cross-entropy + kd_alpha T^2 divergence. divergence,
        temperature, top_k: see `distill.losses`. top_k 0: all tokens. shared: the divergence is
        over these tokens, renormalised. None: both models have the same vocabulary. teacher_labels:
        (student vocabulary,) teacher id of each student token, or -1. None: the same ids.
        chunk_size: tokens at a time. 0: as many as make `CHUNK_ELEMENTS` logits. with_agreement:
        also compute `agreement` and `teacher_ce`, in two more passes over the logits.
    """

    kd_alpha: float = 0.9
    divergence: Divergence = field(default_factory=Divergence)
    temperature: float = 1.0
    top_k: int = 0
    shared: SharedTokens | None = None
    teacher_labels: torch.Tensor | None = None
    chunk_size: int = 0
    with_agreement: bool = False

    def to(self, device: torch.device) -> Recipe:
        """The same recipe with its tensors on `device`."""
        labels = None if self.teacher_labels is None else self.teacher_labels.to(device)
        shared = self.shared
        if shared is not None:
            student, teacher = (
                ids.to(device) if isinstance(ids, torch.Tensor) else ids for ids in shared
            )
            shared = SharedTokens(student, teacher)
        return replace(self, shared=shared, teacher_labels=labels)

    def chunks(self, tokens: int, vocabulary: int, device: torch.device) -> Iterator[slice]:
        """Yield slices of at most `chunk_size` tokens."""
        elements = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS_ELSEWHERE)
        size = self.chunk_size or max(1, elements // vocabulary)
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))


class TokenLosses(NamedTuple):
    """Figures for each token, (N,) in fp32 without gradient.

    ce: cross-entropy. kd: divergence times T^2. teacher_ce: the teacher's cross-entropy, or NaN if
    it is unknown. agreement: 1 if both models have the same most probable token, 0 if not, NaN if
    unknown."""

    ce: torch.Tensor
    kd: torch.Tensor
    teacher_ce: torch.Tensor
    agreement: torch.Tensor


@dataclass
class Targets:
    """The targets of N tokens: labels (N,), and the teacher's predictions unless `teacher` is None.

    `has_teacher` (N,) bool marks the tokens that the teacher predicts (None: all). The others have
    cross-entropy only."""

    labels: torch.Tensor
    teacher: Teacher | None = None
    has_teacher: torch.Tensor | None = None


def chunk_loss(
    logits: torch.Tensor, rows: slice, targets: Targets, recipe: Recipe, with_gradient: bool
) -> tuple[TokenLosses, torch.Tensor | None]:
    """Return the losses of a chunk's tokens for fp32 logits (chunk, V), and the gradient of their
    weighted sum.
    """
    labels = targets.labels[rows]
    log_q = log_probabilities(logits)
    ce = -log_q.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    unknown = torch.full_like(ce, torch.nan)
    if targets.teacher is None or (recipe.kd_alpha == 0 and not recipe.with_agreement):
        gradient = _cross_entropy_gradient(log_q, labels) if with_gradient else None
        return TokenLosses(ce, torch.zeros_like(ce), unknown, unknown), gradient

    said = targets.teacher.chunk(rows)
    teacher_ce, agreement = (
        _compare(logits, labels, said, recipe) if recipe.with_agreement else (unknown, unknown)
    )
    log_q_shared, log_p = _on_common_ground(logits, log_q, said, recipe)
    kd, kd_gradient = value_and_gradient(log_q_shared, log_p, recipe.divergence, recipe.temperature)
    alpha = torch.full_like(ce, recipe.kd_alpha)
    if targets.has_teacher is not None:
        absent = ~targets.has_teacher[rows]
        alpha, kd = alpha.masked_fill(absent, 0.0), kd.masked_fill(absent, 0.0)
        teacher_ce, agreement = (
            teacher_ce.masked_fill(absent, torch.nan),
            agreement.masked_fill(absent, torch.nan),
        )
    losses = TokenLosses(ce, kd, teacher_ce, agreement)
    if not with_gradient:
        return losses, None
    if recipe.kd_alpha == 1 and targets.has_teacher is None and recipe.shared is None:
        return losses, kd_gradient
    gradient = _cross_entropy_gradient(log_q, labels).mul_((1 - alpha).unsqueeze(-1))
    kd_gradient.mul_(alpha.unsqueeze(-1))
    if recipe.shared is None:
        return losses, gradient.add_(kd_gradient)
    if isinstance(recipe.shared.student, slice):
        gradient[:, recipe.shared.student] += kd_gradient
    else:
        gradient.index_add_(1, recipe.shared.student, kd_gradient)
    return losses, gradient


def _cross_entropy_gradient(log_q: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return q - 1 at the labels and q elsewhere, in the memory of `log_q`."""
    gradient = log_q.exp_()
    return gradient.scatter_add_(
        -1, labels.unsqueeze(-1), gradient.new_full((len(labels), 1), -1.0)
    )


def _on_common_ground(
    logits: torch.Tensor, log_q: torch.Tensor, said: torch.Tensor | StoredChunk, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor | Bins]:
    """Return the log-probabilities of student and teacher over the shared tokens, at the recipe's
    temperature.
    """
    shared, temperature = recipe.shared, recipe.temperature
    if shared is not None:
        log_q = log_probabilities(logits[:, shared.student], temperature)
    elif temperature != 1:
        log_q = log_probabilities(logits, temperature)
    if isinstance(said, StoredChunk):
        return log_q, said.bins
    said = said.to(logits.dtype)
    log_p = log_probabilities(said if shared is None else said[:, shared.teacher], temperature)
    return log_q, top_k_with_tail(log_p, recipe.top_k) if recipe.top_k else log_p


def _compare(
    logits: torch.Tensor, labels: torch.Tensor, said: torch.Tensor | StoredChunk, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the teacher's cross-entropy for each label, and whether both models have the same most
    probable token.
    """
    first = logits.argmax(-1)
    if isinstance(said, StoredChunk):
        inside = said.bins.log_p[:, : said.bins.indices.shape[1]]
        best = inside.argmax(-1, keepdim=True)
        return said.cross_entropy, (said.bins.indices.gather(-1, best).squeeze(-1) == first).float()
    if recipe.teacher_labels is not None:
        labels, first = recipe.teacher_labels[labels], recipe.teacher_labels[first]
    log_p = log_probabilities(said)
    known = labels.clamp_min(0).unsqueeze(-1)
    teacher_ce = -log_p.gather(-1, known).squeeze(-1).masked_fill(labels < 0, torch.nan)
    return teacher_ce.float(), (log_p.argmax(-1) == first).float()


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, recipe, with_gradient):
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        # They differ under autocast, after a projection such as that of OPT-350m.
        hidden = hidden.to(weight.dtype)
        chunks: list[torch.Tensor] = []
        d_hidden = torch.empty_like(hidden) if with_gradient else None
        d_weight = torch.zeros_like(weight, dtype=_at_least_fp32(weight)) if with_gradient else None
        d_bias = (
            torch.zeros_like(bias, dtype=_at_least_fp32(bias))
            if with_gradient and bias is not None
            else None
        )
        for rows in recipe.chunks(len(hidden), len(weight), hidden.device):
            part = hidden[rows]
            logits = linear(part, weight, bias)
            logits = logits.to(_at_least_fp32(logits))
            losses, gradient = chunk_loss(logits, rows, targets, recipe, with_gradient)
            del logits
            chunks.append(torch.stack(losses))
            if gradient is None or d_hidden is None or d_weight is None:
                continue
            if d_bias is not None:
                d_bias += gradient.sum(0)
            gradient = gradient.to(weight.dtype)
            torch.mm(gradient, weight, out=d_hidden[rows])
            if weight.dtype == d_weight.dtype:
                d_weight.addmm_(gradient.T, part)
            else:
                d_weight += gradient.T @ part
        ctx.gradients = d_hidden, d_weight, d_bias
        statistics = _joined(chunks, hidden)
        ctx.mark_non_differentiable(statistics)
        return _weighted_sum(TokenLosses(*statistics), targets, recipe), statistics

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        if ctx.gradients is None:
            raise RuntimeError("the loss of the fused head can have one backward only")
        # In place, because the head's gradient is large.
        gradients = (
            None if saved is None else saved.mul_(grad).to(dtype)
            for saved, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        )
        ctx.gradients = None
        return *gradients, None, None, None


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, recipe, with_gradient):
        chunks: list[torch.Tensor] = []
        d_logits = torch.empty_like(logits) if with_gradient else None
        for rows in recipe.chunks(*logits.shape, logits.device):
            part = logits[rows]
            losses, gradient = chunk_loss(
                part.to(_at_least_fp32(part)), rows, targets, recipe, with_gradient
            )
            chunks.append(torch.stack(losses))
            if gradient is not None and d_logits is not None:
                d_logits[rows] = gradient
        ctx.save_for_backward(d_logits)
        statistics = _joined(chunks, logits)
        ctx.mark_non_differentiable(statistics)
        return _weighted_sum(TokenLosses(*statistics), targets, recipe), statistics

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        (d_logits,) = ctx.saved_tensors
        return d_logits * grad.to(d_logits.dtype), None, None, None


def _joined(chunks: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the `TokenLosses` of all chunks as one tensor, (4, N). Without targets N is 0."""
    return torch.cat(chunks, dim=1) if chunks else like.new_zeros(4, 0, dtype=torch.float32)


def _at_least_fp32(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _weighted_sum(losses: TokenLosses, targets: Targets, recipe: Recipe) -> torch.Tensor:
    if targets.teacher is None:
        return losses.ce.sum()
    alpha = torch.full_like(losses.ce, recipe.kd_alpha)
    if targets.has_teacher is not None:
        alpha = alpha.masked_fill(~targets.has_teacher, 0.0)
    return ((1 - alpha) * losses.ce + alpha * losses.kd).sum()


def fused_head_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: Targets,
    recipe: Recipe,
) -> tuple[torch.Tensor, TokenLosses]:
    """Return the sum of N tokens' losses under a linear head, and the losses of each token.

    The sum is a scalar in fp32, differentiable in `hidden` (N, H), `weight` (V, H) and `bias` (V,).
    The caller divides it by the number of tokens of the whole step. The gradient of `weight` is
    summed in fp32, whatever its dtype. There can be one backward only."""
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    total, statistics = _FusedHead.apply(hidden, weight, bias, targets, recipe, with_gradient)
    return total, TokenLosses(*statistics)


def logits_loss(
    logits: torch.Tensor, targets: Targets, recipe: Recipe
) -> tuple[torch.Tensor, TokenLosses]:
    """The same for logits (N, V), if the head is more than a linear map."""
    with_gradient = torch.is_grad_enabled() and logits.requires_grad
    total, statistics = _FromLogits.apply(logits, targets, recipe, with_gradient)
    return total, TokenLosses(*statistics)


@dataclass
class HeadTeacher:
    """A live teacher: hidden states (N, H) and a linear head, (V, H) and (V,) or None.

    Logits are made in chunks.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    device: torch.device

    def chunk(self, rows: slice) -> torch.Tensor:
        return linear(self.hidden[rows], self.weight, self.bias).to(self.device)


@dataclass
class LogitsTeacher:
    """A live teacher whose head is not a plain linear map: all logits (N, V)."""

    logits: torch.Tensor

    def chunk(self, rows: slice) -> torch.Tensor:
        return self.logits[rows]


@dataclass
class StoredTeacher:
    """Rows from a cache: token ids and log-probabilities as `Bins` has them, and the teacher's
    cross-entropy (N,).
    """

    indices: torch.Tensor
    log_p: torch.Tensor
    cross_entropy: torch.Tensor

    def chunk(self, rows: slice) -> StoredChunk:
        log_p = self.log_p[rows].float().clamp_min(LOG_ZERO)
        return StoredChunk(Bins(self.indices[rows].long(), log_p), self.cross_entropy[rows].float())
