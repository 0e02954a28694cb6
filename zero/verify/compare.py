"""Compares two recordings, and says what differs first and why that may be.

This file reads the files that `zero.verify.record` has written. It knows no engine and no process group.

[Note: tolerance]
Sums in another order differ by rounding. With eps of the dtype of the computation, a gradient is equal if the 2-norm of
the difference is at most sqrt(eps) of its own norm. A tensor whose gradient is tiny beside the largest one (by root
mean square: 2 eps, in 16 bits eps / 64) is rounding noise, such as the gradient of a key's bias in attention. It is not
compared, unless the engine has none at all. Adam turns the sign of a tiny gradient into a whole step, so updates may
differ by 5%, in 16 bits by 3 sqrt(eps). Where both runs overflow, there is nothing to compare.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open


@dataclass
class Difference:
    """What differs beyond rounding: a tensor's name, or "loss"; relative: norm of the difference over the norm."""

    step: int
    kind: str
    name: str
    relative: float
    others: int
    cause: str

    def __str__(self) -> str:
        more = f", and {self.others} more" if self.others else ""
        where = "before the first step" if self.step == 0 else f"step {self.step}"
        return f"{where}: {self.kind} of {self.name} differs by {self.relative:.2g} of its size{more}.\n  {self.cause}"


@dataclass
class Result:
    """Rows: (step, kind, tensors compared, tensors left out as noise, largest relative difference, its tensor)."""

    rows: list[tuple[int, str, int, int, float, str]] = field(default_factory=list)
    difference: Difference | None = None


@dataclass
class _Pair:
    """One tensor of both recordings, by sums over its elements: |a|, |b|, |a - b|, a * b; numel."""

    name: str
    engine: float
    plain: float
    apart: float
    product: float
    numel: int

    @property
    def relative(self) -> float:
        if self.apart == 0 or not (math.isfinite(self.engine) or math.isfinite(self.plain)):
            return 0.0
        return math.inf if self.plain == 0 or math.isnan(self.apart) else self.apart / self.plain

    @property
    def ratio(self) -> float:
        """What the plain tensor must be multiplied by to come closest to the engine's."""
        return self.product / self.plain**2 if self.plain else math.nan


def compare(engine: Path, plain: Path) -> Result:
    """Compare the recordings in two folders, step by step, up to the first difference beyond rounding."""
    facts, result = json.loads((engine / "facts.json").read_text()), Result()
    eps = torch.finfo(getattr(torch, facts["dtype"])).eps
    start = [_pair(name, a, b) for name, a, b in _tensors(engine, plain, "start")]
    _judge(result, 0, "value", start, start, 0.0, "The script draws them at random: set a seed in it.")
    for step in range(1, steps_in(engine, plain) + 1):
        if result.difference is None:
            _compare_step(result, step, engine, plain, eps, facts)
    return result


def steps_in(engine: Path, plain: Path) -> int:
    """How many steps both recordings have."""
    count = 0
    while all((folder / f"{count + 1}.json").exists() for folder in (engine, plain)):
        count += 1
    return count


def _compare_step(result: Result, step: int, engine: Path, plain: Path, eps: float, facts: dict) -> None:
    losses = [
        _Pair(f"micro-batch {i} on rank {rank}", abs(a), abs(b), abs(a - b), a * b, 1)
        for rank, both in enumerate(zip(_losses(engine, step), _losses(plain, step), strict=True))
        for i, (a, b) in enumerate(zip(*both, strict=False))
    ]
    cause = (
        "The weights are the same, so the batches or the dropout are not: set a seed, and a fixed order of the data."
        if step == 1
        else "Gradients and updates were equal so far: a buffer, or what the script does between steps, differs."
    )
    if _judge(result, step, "loss", losses, losses, math.sqrt(eps) * step, cause):
        return
    gradients = [_pair(name, a, b) for name, a, b in _tensors(engine, plain, f"{step}.gradients")]
    loud = _without_noise(gradients, eps)
    if _judge(result, step, "gradient", gradients, loud, math.sqrt(eps) * step, _cause_of_gradient(loud, facts)):
        return
    before = "start" if step == 1 else f"{step - 1}.values"
    names = {pair.name for pair in loud}
    former = {name: (a, b) for name, a, b in _tensors(engine, plain, before) if name in names}
    now = [entry for entry in _tensors(engine, plain, f"{step}.values") if entry[0] in former]
    updates = [_pair(name, a - former[name][0], b - former[name][1]) for name, a, b in now]
    limit = max(0.05, 3 * math.sqrt(eps))
    _judge(result, step, "update", gradients, updates, limit, _cause_of_update(updates))


def _judge(
    result: Result, step: int, kind: str, everything: list[_Pair], compared: list[_Pair], limit: float, cause: str
) -> bool:
    """Add a row. If a tensor differs by more than `limit`, say so; True then."""
    if not compared:
        return False
    worst = max(compared, key=lambda pair: pair.relative)
    left_out = len(everything) - len(compared)
    result.rows.append((step, kind, len(compared), left_out, worst.relative, worst.name))
    beyond = [pair for pair in compared if pair.relative > limit]
    if beyond:
        first = beyond[0]
        result.difference = Difference(step, kind, first.name, first.relative, len(beyond) - 1, cause)
    return bool(beyond)


def _without_noise(pairs: list[_Pair], eps: float) -> list[_Pair]:
    def size(pair: _Pair) -> float:
        return max(pair.engine, pair.plain) / math.sqrt(pair.numel)

    largest = max(map(size, pairs), default=0.0)
    in_16_bits = eps > torch.finfo(torch.float32).eps
    limit = (eps / 64 if in_16_bits else 2 * eps) * largest
    lost = 2 * torch.finfo(torch.float32).eps * largest
    return [pair for pair in pairs if not size(pair) <= (lost if pair.engine == 0 else limit)]


def _cause_of_gradient(pairs: list[_Pair], facts: dict) -> str:
    lost = [pair.name for pair in pairs if pair.engine == 0 and pair.plain > 0]
    if lost:
        return (
            f"The engine has no gradient for {_some(lost)}: the parameter is read where the engine does not see it. "
            "Please report the module's forward."
        )
    ratios = [pair.ratio for pair in pairs if pair.plain > 0]
    alike = ratios and max(ratios) - min(ratios) <= 0.01 * abs(max(ratios, key=abs)) and abs(ratios[0] - 1) > 0.01
    if not alike:
        return "Single tensors differ: their module's backward has run on other values, or not on every rank."
    ratio = ratios[0]
    known = [
        (facts["ranks"], "they are summed over ranks, not averaged"),
        (1 / facts["ranks"], "they are divided by the number of ranks twice"),
        (facts["accumulation"], "the loss is not divided by gradient_accumulation_steps"),
        (1 / facts["accumulation"], "the loss is divided by gradient_accumulation_steps twice"),
    ]
    named = [text for factor, text in known if factor != 1 and abs(ratio / factor - 1) < 0.01]
    cause = ", or ".join(named or ["a wrong loss scale", "another mean"])
    return f"All gradients are {ratio:.4g} times the plain ones: {cause}."


def _cause_of_update(pairs: list[_Pair]) -> str:
    frozen = [pair.name for pair in pairs if pair.engine == 0 and pair.plain > 0]
    if frozen:
        return f"The step has not changed {_some(frozen)}: frozen for the engine, or not in its optimizer."
    ratios = [pair.ratio for pair in pairs if pair.plain > 0]
    if ratios and max(ratios) - min(ratios) <= 0.05 * abs(max(ratios, key=abs)):
        return f"All updates are {ratios[0]:.3g} times the plain ones: another learning rate, or clipping."
    return "Equal gradients, other updates: the optimizer's settings or state differ for these tensors."


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _losses(folder: Path, step: int) -> list[list[float]]:
    return json.loads((folder / f"{step}.json").read_text())


def _pair(name: str, a: torch.Tensor, b: torch.Tensor) -> _Pair:
    a, b = a.double(), b.double()
    return _Pair(name, a.norm().item(), b.norm().item(), (a - b).norm().item(), (a * b).sum().item(), max(1, a.numel()))


def _tensors(engine: Path, plain: Path, name: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, the engine's, the plain one) in the model's order. What only one side has is compared with zeros."""
    file = f"{name}.safetensors"
    with safe_open(engine / file, "pt") as a, safe_open(plain / file, "pt") as b:
        names_of_a, names_of_b = set(a.keys()), set(b.keys())
        for key in json.loads((plain / "facts.json").read_text())["names"]:
            first = a.get_tensor(key) if key in names_of_a else None
            second = b.get_tensor(key) if key in names_of_b else None
            if first is not None or second is not None:
                yield key, _or_zeros(first, second), _or_zeros(second, first)


def _or_zeros(tensor: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros_like(other) if tensor is None else tensor
