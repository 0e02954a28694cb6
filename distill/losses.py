"""Distillation losses on logits: values of each token, with closed-form gradients.

[Note: how every loss is computed] p is the teacher's distribution, q the student's. Both are
softmax(logits / T). For each token a divergence D gives its value and the product q u, where u =
dD/dq. The chain rule through the softmax is the same for all divergences:

    d(T^2 D) / d(student logits) = T (q u - q sum(q u))

A constant in u cancels, so u is given without constants. Softmax is computed at least in fp32,
whatever the dtype of the logits: in bf16 it is off by tens of per cent for single tokens.

Values are multiplied by T^2 (arXiv 1503.02531), so that gradients stay on the same scale when T
changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from distill.options import LOSS_TYPES

# The logarithm of a probability of zero. Its exp() is 0 in fp32 and fp64. It is finite, so 0 times
# it is 0.
LOG_ZERO = -1e4


class ValueAndSlope(NamedTuple):
    """The result of a divergence for N tokens: value (N,), and `weighted_slope` (N, V), which is q
    dD/dq.
    """

    value: torch.Tensor
    weighted_slope: torch.Tensor


@dataclass(frozen=True)
class Divergence:
    """A loss between two distributions. Only "jsd" uses `beta`, and only the two skew losses use
    `skew_alpha`.

    Sources: forward KL arXiv 1503.02531, reverse KL 2306.08543, generalised JSD 2306.13649, skew KL
    2402.03898, ULD (sorted probabilities, for different vocabularies) 2402.12030.

    Raises:
        ValueError: the loss is unknown, or a parameter is out of range.
    """

    loss_type: str = "forward_kl"
    beta: float = 0.5
    skew_alpha: float = 0.1

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(
                f"loss_type {self.loss_type!r} is unknown: choose one of {', '.join(LOSS_TYPES)}"
            )
        if not 0 < self.beta < 1:
            raise ValueError(
                f"beta is {self.beta}: generalised JSD needs 0 < beta < 1 (it tends to 0 at both "
                "ends);"
                f" for the limits use loss_type forward_kl or reverse_kl"
            )
        if not 0 <= self.skew_alpha < 1:
            raise ValueError(
                f"skew_alpha is {self.skew_alpha}: it must be at least 0 and less than 1"
            )

    def __call__(self, log_q: torch.Tensor, log_p: torch.Tensor) -> ValueAndSlope:
        """Return value and slope for log-probabilities (N, V) of student and teacher. "uld" allows
        different V.
        """
        return _FORMULAS[self.loss_type](self, log_q, log_p)


def _forward_kl(_: Divergence, log_q: torch.Tensor, log_p: torch.Tensor) -> ValueAndSlope:
    """KL(p || q), arXiv 1503.02531."""
    p = log_p.exp()
    return ValueAndSlope(torch.linalg.vecdot(p, log_p - log_q), p.neg_())


def _reverse_kl(_: Divergence, log_q: torch.Tensor, log_p: torch.Tensor) -> ValueAndSlope:
    """KL(q || p), arXiv 2306.08543."""
    weighted = (log_q - log_p).mul_(log_q.exp())
    return ValueAndSlope(weighted.sum(-1), weighted)


def _jsd(divergence: Divergence, log_q: torch.Tensor, log_p: torch.Tensor) -> ValueAndSlope:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q, arXiv 2306.13649."""
    beta = divergence.beta
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    of_teacher = torch.linalg.vecdot(log_p.exp(), log_p - log_m)
    weighted = torch.sub(log_q, log_m, out=log_m).mul_(log_q.exp()).mul_(1 - beta)
    return ValueAndSlope(beta * of_teacher + weighted.sum(-1), weighted)


def _skew_forward_kl(
    divergence: Divergence, log_q: torch.Tensor, log_p: torch.Tensor
) -> ValueAndSlope:
    """KL(p || a p + (1 - a) q), arXiv 2402.03898."""
    alpha = divergence.skew_alpha
    log_m = torch.logaddexp(log_p + _log(alpha), log_q + math.log1p(-alpha))
    value = torch.linalg.vecdot(log_p.exp(), log_p - log_m)
    return ValueAndSlope(
        value, torch.sub(log_p, log_m, out=log_m).add_(log_q).exp_().mul_(alpha - 1)
    )


def _skew_reverse_kl(
    divergence: Divergence, log_q: torch.Tensor, log_p: torch.Tensor
) -> ValueAndSlope:
    """KL(q || a q + (1 - a) p), arXiv 2402.03898."""
    alpha = divergence.skew_alpha
    log_m = torch.logaddexp(log_q + _log(alpha), log_p + math.log1p(-alpha))
    log_ratio = torch.sub(log_q, log_m, out=log_m)
    q = log_q.exp()
    value = torch.linalg.vecdot(q, log_ratio)
    return ValueAndSlope(value, log_ratio.sub_(log_ratio.exp().mul_(alpha)).mul_(q))


def _uld(_: Divergence, log_q: torch.Tensor, log_p: torch.Tensor) -> ValueAndSlope:
    """The sum of |differences| of sorted, zero-padded probabilities, arXiv 2402.12030."""
    q, order = log_q.exp().sort(dim=-1, descending=True)
    p = log_p.exp().sort(dim=-1, descending=True).values
    width = max(q.shape[-1], p.shape[-1])
    difference = _widen(q, width) - _widen(p, width)
    weighted = difference.sign()[:, : q.shape[-1]].mul_(q)
    return ValueAndSlope(
        difference.abs().sum(-1), torch.empty_like(q).scatter_(-1, order, weighted)
    )


_FORMULAS: dict[str, Callable[[Divergence, torch.Tensor, torch.Tensor], ValueAndSlope]] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
    "skew_forward_kl": _skew_forward_kl,
    "skew_reverse_kl": _skew_reverse_kl,
    "uld": _uld,
}


def _log(value: float) -> float:
    return math.log(value) if value > 0 else LOG_ZERO


def _widen(values: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[-1]))


def log_probabilities(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return log softmax(logits / T) over the last dimension, at least in fp32.

    A logit of -inf gives `LOG_ZERO`.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(
        logits if temperature == 1 else logits / temperature, dim=-1
    ).clamp_min_(LOG_ZERO)


class Bins(NamedTuple):
    """A teacher's distribution as k tokens, with or without the mass of all others.

    indices: (N, k) token ids, all different. log_p: (N, k + 1) log-probabilities, where the last
    column is the tail, or (N, k) for sampled tokens, which stand for the whole distribution. They
    sum to 1, so a divergence on them compares distributions. (Renormalising the k most probable
    tokens alone is biased, arXiv 2503.16870.)"""

    indices: torch.Tensor
    log_p: torch.Tensor


def top_k_with_tail(log_p: torch.Tensor, k: int) -> Bins:
    """Return the bins of dense log-probabilities (N, V), with the exact tail.

    Raises ValueError unless 0 < k < V.
    """
    _check_k(k, log_p)
    indices = log_p.topk(k, dim=-1).indices
    tail = log_p.scatter(-1, indices, -math.inf).logsumexp(dim=-1, keepdim=True)
    inside = log_p.gather(-1, indices)
    return Bins(indices, torch.cat([inside, tail.clamp_min_(LOG_ZERO)], dim=-1))


def sampled_bins(log_p: torch.Tensor, k: int, generator: torch.Generator | None = None) -> Bins:
    """Return k sampled tokens for each row of dense log-probabilities (N, V), without a tail.

    Their probabilities are an unbiased estimate of the whole distribution, and so is the gradient
    of the forward KL divergence, which is linear in them (arXiv 2503.16870). A token is sampled
    with the probability min(1, c p), where c makes the expected number of samples k, and counts as
    max(p, 1 / c). Probable tokens therefore keep their exact values, and only the rest is drawn.
    Among all unbiased estimates with k tokens, this one has the smallest variance (VarOpt, arXiv
    0803.0473). The estimates of a row sum to 1.

    Raises ValueError unless 0 < k < V.
    """
    _check_k(k, log_p)
    p = log_p.double().exp()
    p /= p.sum(dim=-1, keepdim=True)
    largest = p.topk(k, dim=-1).values
    # If the m largest are certain, the other k - m samples share the mass of all others.
    rest = (1 - largest.cumsum(-1) + largest).clamp_min_(torch.finfo(p.dtype).tiny)
    scale = torch.arange(k, 0, -1, device=p.device) / rest
    is_possible = scale * largest <= 1
    is_possible[:, -1] = True  # rounding must not leave none
    scale = scale.gather(-1, is_possible.int().argmax(-1, keepdim=True))
    # Systematic sampling: a token is drawn where the sum of probabilities passes an integer.
    offset = torch.rand(len(p), 1, generator=generator, dtype=p.dtype, device=p.device)
    passed = (p * scale).clamp_max_(1).cumsum_(-1).add_(offset).floor_()
    drawn = passed.diff(dim=-1, prepend=torch.zeros_like(offset)) > 0
    indices = drawn.float().topk(k, dim=-1).indices  # undrawn ones fill up where p has fewer than k
    estimate = torch.maximum(p, 1 / scale).gather(-1, indices) * drawn.gather(-1, indices)
    return Bins(indices, estimate.log().clamp_min_(LOG_ZERO).float())


def _check_k(k: int, log_p: torch.Tensor) -> None:
    if not 0 < k < log_p.shape[-1]:
        raise ValueError(
            f"top_k is {k}: it must be at least 1 and less than the {log_p.shape[-1]} shared tokens"
        )


def value_and_gradient(
    log_q: torch.Tensor, teacher: torch.Tensor | Bins, divergence: Divergence, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return T^2 times the divergence, (N,), and its gradient on the student's logits, (N, V).

    `log_q` (N, V): the student's log-probabilities at temperature T. `teacher`: dense ones or bins,
    at the same T."""
    if isinstance(teacher, Bins):
        value, gradient = _binned(log_q, teacher, divergence)
    else:
        value, weighted = divergence(log_q, teacher)
        gradient = torch.addcmul(weighted, log_q.exp(), weighted.sum(-1, keepdim=True), value=-1)
    if temperature != 1:
        value.mul_(temperature**2)
        gradient.mul_(temperature)
    return value, gradient


def _binned(
    log_q: torch.Tensor, teacher: Bins, divergence: Divergence
) -> tuple[torch.Tensor, torch.Tensor]:
    q, indices = log_q.exp(), teacher.indices
    inside, bins = q.gather(-1, indices), log_q.gather(-1, indices)
    has_tail = teacher.log_p.shape[-1] > indices.shape[-1]
    if has_tail:
        # The sum of all others is exact where 1 - sum(inside) would cancel.
        tail = q.scatter_(-1, indices, 0.0).sum(-1, keepdim=True)
        bins = torch.cat([bins, tail.log().clamp_min_(LOG_ZERO)], dim=-1)
    value, weighted = divergence(bins, teacher.log_p)
    total = weighted.sum(-1, keepdim=True)
    of_others = -total
    if has_tail:
        # Each token of the tail has the slope of the tail's bin.
        of_others += weighted[:, -1:] / tail.clamp_min(torch.finfo(tail.dtype).tiny)
        weighted = weighted[:, :-1]
    of_inside = torch.addcmul(weighted, inside, total, value=-1)
    return value, q.mul_(of_others).scatter_(-1, indices, of_inside)
