"""The losses as the papers write them, in plain float64 torch. Autograd gives their gradients."""

from __future__ import annotations

import torch


def log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.log_softmax(logits / temperature, dim=-1)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p.log() - q.log())).sum(-1)


def divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    loss_type: str,
    temperature: float,
    beta: float = 0.5,
    skew_alpha: float = 0.1,
    top_k: int = 0,
) -> torch.Tensor:
    """Return T^2 times the loss of each token, for float64 logits (N, V)."""
    p, q = log_softmax(teacher, temperature).exp(), log_softmax(student, temperature).exp()
    if top_k:
        indices = p.topk(top_k, dim=-1).indices
        p, q = (
            torch.cat([x.gather(-1, indices), 1 - x.gather(-1, indices).sum(-1, True)], -1)
            for x in (p, q)
        )
    if loss_type == "forward_kl":
        value = kl(p, q)
    elif loss_type == "reverse_kl":
        value = kl(q, p)
    elif loss_type == "jsd":
        m = beta * p + (1 - beta) * q
        value = beta * kl(p, m) + (1 - beta) * kl(q, m)
    elif loss_type == "skew_forward_kl":
        value = kl(p, skew_alpha * p + (1 - skew_alpha) * q)
    elif loss_type == "skew_reverse_kl":
        value = kl(q, skew_alpha * q + (1 - skew_alpha) * p)
    else:
        p, q = p.sort(descending=True).values, q.sort(descending=True).values
        width = max(p.shape[-1], q.shape[-1])
        p, q = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (p, q))
        value = (p - q).abs().sum(-1)
    return temperature**2 * value
