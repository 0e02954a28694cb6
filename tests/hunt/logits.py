"""Odd uses of a model's logits, which `batch_slices` computes in chunks of tokens: losses and
gradients are those of plain torch, whatever a script does with them.

A recipe is a chain of functions from logits to a loss, drawn from a table. Those that work on whole
rows come first in it; the others need all logits."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from unittest import mock

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional

import zero
from tests.dist.training import ds_config
from zero.fragments import safe_get_full_grad
from zero.slicing import head
from zero.slicing.head import Logits

WORDS, HIDDEN, CHUNK = 11, 6, 4
SHAPES = ((2, 5), (3, 4), (7,), (1, 9), (2, 3, 2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])
        self.lm_head = nn.Linear(HIDDEN, WORDS)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(hidden)


class Squares(torch.autograd.Function):
    """A function that torch does not tell of the class of its arguments."""

    @staticmethod
    def forward(ctx, values):
        ctx.save_for_backward(values * 1)
        return (values * values).sum(-1)

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad.unsqueeze(-1)


def _labels(rows: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(len(rows)) % rows.shape[-1]
    labels[::4] = -100
    return labels


def _mask(logits: torch.Tensor) -> torch.Tensor:
    lead = logits.shape[:-1]
    return torch.arange(lead.numel()).view(lead) % 3 != 0


def _entropy(**options) -> Callable[[torch.Tensor], torch.Tensor]:
    def loss(logits: torch.Tensor) -> torch.Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        return functional.cross_entropy(rows, _labels(rows), **options)

    return loss


def _weighted(logits: torch.Tensor) -> torch.Tensor:
    rows = logits.reshape(-1, logits.shape[-1])
    weight = torch.arange(1.0, 1 + rows.shape[-1], dtype=rows.dtype)
    return functional.cross_entropy(rows, _labels(rows), weight)


def _measured(logits: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        median = logits.median()
    return logits - median


def _constant_target(logits: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = functional.softmax(logits, -1)
    return target * functional.log_softmax(logits, -1)


def _ones(logits: torch.Tensor) -> torch.Tensor:
    return torch.ones(*logits.shape[:-1], 2, dtype=torch.long)


BY_ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scaled": lambda logits: logits * 0.7,
    "subtracted from": lambda logits: 2 - logits,
    "divided by a tensor": lambda logits: logits / torch.tensor(3.0),
    "capped": lambda logits: torch.tanh(logits / 2) * 2,
    "with a bias": lambda logits: logits + torch.linspace(0, 1, logits.shape[-1])[None],
    "negated": torch.neg,
    "cast": lambda logits: logits.double(),
    "clamped": lambda logits: logits.clamp(min=-0.3),
    "log_softmax": lambda logits: functional.log_softmax(logits, -1),
    "softmax in float64": lambda logits: torch.softmax(logits, -1, torch.float64),
    "softmax by a positive dim": lambda logits: logits.softmax(logits.dim() - 1),
    "shifted": lambda logits: logits[..., :-1, :].contiguous(),
    "a part": lambda logits: logits[:, 1:] if logits.dim() > 2 else logits[1:],
    "an example": lambda logits: logits[0] if logits.dim() > 2 else logits[:1],
    "masked": lambda logits: logits[_mask(logits)],
    "flat": lambda logits: logits.view(-1, logits.shape[-1]),
    "flattened": lambda logits: logits.flatten(0, -2),
    "unsqueezed": lambda logits: logits.unsqueeze(0),
    "gathered": lambda logits: logits.gather(-1, _ones(logits)),
    "cross-entropy": _entropy(),
    "sum of cross-entropies": _entropy(reduction="sum"),
    "cross-entropies": _entropy(reduction="none"),
    "smoothed": _entropy(label_smoothing=0.1),
    "weighted by word": _weighted,
    "logsumexp": lambda logits: torch.logsumexp(logits, -1),
    "mean": lambda logits: logits.mean(-1),
    "sum that keeps": lambda logits: logits.sum(-1, keepdim=True),
    "greatest": lambda logits: logits.amax(dim=(-1,)),
    "row by row": lambda logits: torch.stack([torch.logsumexp(row, -1) for row in logits]),
    "with the greatest": lambda logits: logits + logits.detach().argmax(-1, keepdim=True),
}
AS_A_WHOLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "some words": lambda logits: logits[..., 1:],
    "transposed": lambda logits: logits.transpose(0, -1),
    "scaled by row": lambda logits: logits * (1.0 + _mask(logits)[..., None]),
    "softmax over tokens": lambda logits: logits.softmax(0),
    "read without gradients": _measured,
    "sum": torch.sum,
    "twice": lambda logits: torch.cat([logits, 2 * logits]),
    "where": lambda logits: torch.where(logits > 0, logits, logits * 0.1),
    "multiplied": lambda logits: logits @ logits.new_ones(logits.shape[-1], 3),
    "sorted": lambda logits: logits.sort(-1).values,
    "deviation": lambda logits: logits.std(-1, correction=0),
    "filled": lambda logits: logits.masked_fill(logits < 0, 0.5),
    "with zeros": lambda logits: logits + torch.zeros_like(logits) + logits.new_zeros(logits.shape),
    "with a number": lambda logits: logits + 0.01 * float(logits.detach().numpy().sum()),
    "with a constant target": _constant_target,
    "a wider sum": lambda logits: logits * torch.linspace(0, 1, logits.shape[-1])[None, None, None],
    "a library's function": Squares.apply,
}


def loss_of(seed: int, logits: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """The loss, and the names of what has made it."""
    draw, names = random.Random(seed), []
    for _ in range(draw.randint(1, 5)):
        table = BY_ROWS if draw.random() < 0.7 else AS_A_WHOLE
        names.append(draw.choice([*table]))
        logits = table[names[-1]](logits)
        if logits.dim() < 2:
            break
    return (logits * torch.linspace(0.5, 1.5, logits.shape[-1] if logits.dim() else 1)).sum(), names


def judge(
    rank: int, world_size: int, stage: int, seeds: list[int], is_adapted: bool = False
) -> list[str]:
    """What differs from plain torch. Recipes that plain torch cannot run are left out.

    `is_adapted`: only the block and LoRA on the head are trained."""
    torch.manual_seed(0)
    plain: nn.Module = Model()
    if is_adapted:
        lora = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
        inject_adapter_in_model(lora, plain)
        plain.layers.requires_grad_(True)
    config = ds_config(
        stage=stage,
        stage3_param_persistence_threshold=0,
        activation_checkpointing={"batch_slices": 2, "trust_slices": True},
    )
    model = deepcopy(plain)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.0)
    engine = zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    found = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        shape = (*random.Random(seed).choice(SHAPES), HIDDEN)
        given = torch.randn(shape, generator=generator)
        plain.zero_grad()
        try:
            expected, names = loss_of(seed, plain(given))
            expected.backward()
        except (RuntimeError, IndexError, ValueError):
            continue
        with mock.patch.dict(head.CHUNK_ELEMENTS, cpu=CHUNK * WORDS):
            logits = engine(given)
            assert type(logits) is Logits
            loss, _ = loss_of(seed, logits)
            engine.backward(loss)
        for name, param in trained.items():
            gradient, other = safe_get_full_grad(param), plain.get_parameter(name).grad
            assert gradient is not None and other is not None
            if not _close(gradient, other):
                found.append(f"{seed}: {names}: gradient of {name}")
        engine.step()
        if not _close(loss.detach(), expected.detach()):
            found.append(f"{seed}: {names}: loss {loss.item()}, expected {expected.item()}")
    engine.destroy()
    return found


def _close(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results differ by rounding. Some gradients are zero but for rounding."""
    value, other = (each.nan_to_num(posinf=0.0, neginf=0.0) for each in (value, other))
    return bool((value - other).norm() <= 2e-5 * (other.norm() + 1))
