"""Compares two recordings, and says what differs first and why that may be.

This file reads the files that `zero.tools.verify.record` has written. It knows no engine and no
process group.

[Note: tolerance] Sums in another order differ by rounding. With eps of the dtype of the
computation, a gradient is equal if the 2-norm of the difference is at most sqrt(eps) of its own
norm. A tensor whose gradient is tiny beside the largest one (by root mean square: 2 eps, in 16 bits
eps / 64) is rounding noise, such as the gradient of a key's bias in attention. It is not compared,
unless the engine has none at all. Where both runs overflow, there is nothing to compare.

What follows from gradients can be as equal as they are. Let d be the largest difference of a
gradient so far. Optimizer states may differ by 10 d. Adam turns the sign of a tiny gradient into a
whole step, in a share of d of the elements, so updates may differ by 10 sqrt(d). Signs do not
change norms: those of all updates, or of all tensors of one state, may differ by 10 d, and at most
2%. Each limit is at least 0.1%. Muon computes in bf16: updates of whole tensors may always differ
by 5%, in 16 bits by 3 sqrt(eps). Elements that have had no gradient so far change by weight decay
alone, which may differ by 5%. An update is known to the last place of its value: no difference
below that counts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import safe_open

# Settings of a param group that say how to compute. The engine decides them.
_HOW = {"foreach", "fused", "capturable", "differentiable"}


@dataclass
class Difference:
    """What differs beyond rounding: a tensor, a loss or a setting; relative: norm of the difference
    over the norm.
    """

    step: int
    kind: str
    name: str
    relative: float
    others: int
    cause: str

    def __str__(self) -> str:
        more = f", and {self.others} more" if self.others else ""
        where = "before the first step" if self.step == 0 else f"step {self.step}"
        what = self.name if self.kind == "setting" else f"{self.kind} of {self.name}"
        by = f" by {self.relative:.2g} of its size" if math.isfinite(self.relative) else ""
        return f"{where}: {what} differs{by}{more}.\n  {self.cause}"


@dataclass
class Result:
    """Rows: (step, kind, tensors compared, tensors left out as noise, largest relative difference,
    its tensor).

    largest_of_gradients: the largest relative difference of a gradient that was taken for rounding.
    skipped: how many steps both runs skipped, because gradients were not finite: then there is
    little to compare."""

    rows: list[tuple[int, str, int, int, float, str]] = field(default_factory=list)
    difference: Difference | None = None
    largest_of_gradients: float = 0.0
    skipped: int = 0


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
    """Compare the recordings in two folders, step by step, up to the first difference beyond
    rounding.
    """
    facts, result = json.loads((engine / "facts.json").read_text()), Result()
    eps = torch.finfo(getattr(torch, facts["dtype"])).eps
    start = [_pair(name, a, b) for name, a, b in _tensors(engine, plain, "start")]
    _judge(
        result,
        0,
        "value",
        start,
        start,
        0.0,
        "Likely the script draws them at random: set a seed in it.",
    )
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


def _compare_step(
    result: Result, step: int, engine: Path, plain: Path, eps: float, facts: dict
) -> None:
    here, there = (json.loads((folder / f"{step}.json").read_text()) for folder in (engine, plain))
    both = enumerate(zip(here["losses"], there["losses"], strict=True))
    losses = [
        _pair(f"micro-batch {i} on rank {rank}", torch.tensor(a), torch.tensor(b))
        for rank, of_rank in both
        for i, (a, b) in enumerate(zip(*of_rank, strict=False))
    ]
    cause = (
        "The weights are the same, so likely the batches or the dropout are not: set a seed and a "
        "fixed order of data."
        if step == 1
        else "Gradients and updates were equal so far: likely a buffer, or what the script does "
        "between steps, differs."
    )
    limit = math.sqrt(eps) * step
    if _judge(result, step, "loss", losses, losses, limit, cause):
        return
    gradients = [_pair(name, a, b) for name, a, b in _tensors(engine, plain, f"{step}.gradients")]
    loud = _without_noise(gradients, eps)
    if _judge(result, step, "gradient", gradients, loud, limit, _cause_of_gradient(loud, facts)):
        return
    apart = result.largest_of_gradients = max(
        result.largest_of_gradients, *(pair.relative for pair in loud), 0.0
    )
    if _compare_settings(result, step, here, there):
        return
    result.skipped += not here["applied"]
    norms = [_pair("all gradients", *(torch.tensor(done["norm"]) for done in (here, there)))]
    if _judge(
        result,
        step,
        "norm",
        norms,
        norms,
        limit,
        "The gradients are equal, so they are added up wrongly.",
    ):
        return
    names = {pair.name for pair in loud}
    for file in sorted(
        file.stem for file in engine.glob(f"{step}.state.*") if (plain / file.name).exists()
    ):
        found = [_pair(*each) for each in _tensors(engine, plain, file) if each[0] in names]
        states = [pair for pair in found if pair.plain > 0]
        most, key = min(max(0.01, 2 * limit), max(1e-3, 10 * apart)), file.split(".", 2)[2]
        if _judge(result, step, key, gradients, states, most, _cause_of_state(states), apart):
            return
    updates, decays = _updates(engine, plain, step, names, _noise(gradients, eps))
    cause = (
        "These elements have had no gradient yet: weight decay differs, or the engine changes "
        "what it must not."
    )
    if facts["elementwise"] and _judge(result, step, "decay", decays, decays, 0.05, cause):
        return
    spread = apart if facts["elementwise"] else math.inf
    limit = min(max(0.05, 3 * math.sqrt(eps)), max(1e-3, 10 * math.sqrt(spread)))
    _judge(result, step, "update", gradients, updates, limit, _cause_of_update(updates), spread)


def _updates(
    engine: Path, plain: Path, step: int, names: set[str], noise: float
) -> tuple[list[_Pair], list[_Pair]]:
    """What the step has changed where the gradient is not noise, and where there has been none so
    far.

    A third of GPT-2's `c_attn.bias` is noise. Tokens that no batch had have no gradient in an
    embedding."""
    updates, decays = [], []
    files = ["start" if step == 1 else f"{step - 1}.values", f"{step}.values"]
    files += [f"{number}.gradients" for number in range(step, 0, -1)]
    for before, after, *gradients in zip(
        *(_tensors(engine, plain, file) for file in files), strict=True
    ):
        changed = [after[side] - before[side] for side in (1, 2)]
        has_none = torch.stack([(a == 0) & (b == 0) for _, a, b in gradients]).all(0)
        if has_none.any():
            decays.append(_update(after[0], *changed, before[2], has_none))
        if after[0] in names:
            is_loud = torch.maximum(*(gradient.abs() for gradient in gradients[0][1:])) > noise
            updates.append(_update(after[0], *changed, before[2], is_loud))
    return updates, decays


def _update(
    name: str, a: torch.Tensor, b: torch.Tensor, values: torch.Tensor, where: torch.Tensor
) -> _Pair:
    """A value may be rounded up or down, so a difference of one group in its last place is none."""
    pair = _pair(name, where * a, where * b)
    last_place = torch.finfo(torch.float32).eps * (where * values).double().norm().item()
    return replace(pair, apart=0.0 if pair.apart <= last_place else pair.apart - last_place)


def _compare_settings(result: Result, step: int, engine: dict, plain: dict) -> bool:
    """What a step goes by: whether it was skipped, the loss scale, the numbers of the param
    groups.
    """
    here, there = _settings(engine), _settings(plain)
    both = {name: (here[name], there[name]) for name in there if name in here}
    different = {name: values for name, values in both.items() if values[0] != values[1]}
    result.rows.append(
        (step, "setting", len(both), 0, float(bool(different)), next(iter(different or both)))
    )
    if different:
        name, (a, b) = next(iter(different.items()))
        cause = f"It is {a} on the engine and {b} on plain torch."
        result.difference = Difference(step, "setting", name, math.inf, len(different) - 1, cause)
    return bool(different)


def _settings(done: dict) -> dict[str, object]:
    found = {"whether the step was skipped": not done["applied"], "the loss scale": done["scale"]}
    for number, group in enumerate(done["groups"]):
        found |= {
            f"{key} of param group {number}": value
            for key, value in group.items()
            if key not in _HOW
        }
    return found


def _judge(
    result: Result,
    step: int,
    kind: str,
    everything: list[_Pair],
    compared: list[_Pair],
    limit: float,
    cause: str,
    apart: float | None = None,
) -> bool:
    """Add a row. If a tensor differs by more than `limit`, say so; True then.

    `apart`: the largest difference of a gradient. The norm of all tensors may differ by ten times
    that."""
    if not compared:
        return False
    worst = max(compared, key=lambda pair: pair.relative)
    left_out = len(everything) - len(compared)
    result.rows.append((step, kind, len(compared), left_out, worst.relative, worst.name))
    beyond = [pair for pair in compared if pair.relative > limit]
    if beyond:
        first = beyond[0]
        result.difference = Difference(
            step, kind, first.name, first.relative, len(beyond) - 1, cause
        )
    elif apart is not None and (factor := _factor(compared)) > max(1e-3, min(0.02, 10 * apart)):
        result.difference = Difference(step, kind, "all tensors together", factor, 0, cause)
    return result.difference is not None


def _factor(pairs: list[_Pair]) -> float:
    """How far the ratio of the norms of all tensors is from 1; 0 if they are not finite."""
    engine, plain = (
        math.hypot(*norms)
        for norms in zip(*((pair.engine, pair.plain) for pair in pairs), strict=True)
    )
    return (
        abs(engine / plain - 1) if plain and math.isfinite(engine) and math.isfinite(plain) else 0.0
    )


def _size(pair: _Pair) -> float:
    return max(pair.engine, pair.plain) / math.sqrt(pair.numel)


def _noise(pairs: list[_Pair], eps: float) -> float:
    """Root mean square of a gradient, or size of an element, up to which it is rounding noise."""
    in_16_bits = eps > torch.finfo(torch.float32).eps
    return (eps / 64 if in_16_bits else 2 * eps) * max(map(_size, pairs), default=0.0)


def _without_noise(pairs: list[_Pair], eps: float) -> list[_Pair]:
    noise = _noise(pairs, eps)
    lost = 2 * torch.finfo(torch.float32).eps * max(map(_size, pairs), default=0.0)
    return [pair for pair in pairs if not _size(pair) <= (lost if pair.engine == 0 else noise)]


def _cause_of_gradient(pairs: list[_Pair], facts: dict) -> str:
    lost = [pair.name for pair in pairs if pair.engine == 0 and pair.plain > 0]
    if lost:
        return (
            f"The engine has no gradient for {_some(lost)}: likely it is read where the engine "
            "does not see it. "
            "Please report the module's forward."
        )
    if (ratio := _common_ratio(pairs)) is None:
        return (
            "Single tensors differ: their module's backward has run on other values, or not on "
            "every rank."
        )
    known = [
        (facts["ranks"], "they are summed over ranks, not averaged"),
        (1 / facts["ranks"], "they are divided by the number of ranks twice"),
        (facts["accumulation"], "the loss is not divided by gradient_accumulation_steps"),
        (1 / facts["accumulation"], "the loss is divided by gradient_accumulation_steps twice"),
    ]
    named = [text for factor, text in known if factor != 1 and abs(ratio / factor - 1) < 0.01]
    cause = ", or ".join(named or ["a wrong loss scale", "another mean"])
    return f"All gradients are {ratio:.4g} times the plain ones: {cause}."


def _cause_of_state(pairs: list[_Pair]) -> str:
    if (ratio := _common_ratio(pairs)) is not None:
        return (
            f"All are {ratio:.4g} times the plain ones: likely clipping, or another decay rate "
            "than the setting."
        )
    return (
        "Gradients and settings are equal: the optimizer's state is updated in another way for "
        "these tensors."
    )


def _cause_of_update(pairs: list[_Pair]) -> str:
    frozen = [pair.name for pair in pairs if pair.engine == 0 and pair.plain > 0]
    if frozen:
        return (
            f"The step has not changed {_some(frozen)}: frozen for the engine, or not in its "
            "optimizer."
        )
    if (ratio := _common_ratio(pairs)) is not None:
        return (
            f"All updates are {ratio:.4g} times the plain ones: likely clipping, or another "
            "learning rate."
        )
    return (
        "Gradients, settings and states are equal: the optimizer's formula differs for these "
        "tensors."
    )


def _common_ratio(pairs: list[_Pair]) -> float | None:
    """The engine's tensors are the plain ones times this number, which explains their differences;

    None if not.
    """
    pairs = [pair for pair in pairs if pair.plain > 0]
    ratios = [pair.ratio for pair in pairs]
    explained = all(abs(pair.ratio - 1) >= 0.98 * pair.relative for pair in pairs)
    return (
        ratios[0]
        if ratios and explained and max(ratios) - min(ratios) <= 0.01 * abs(max(ratios, key=abs))
        else None
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _pair(name: str, a: torch.Tensor, b: torch.Tensor) -> _Pair:
    a, b = a.double(), b.double()
    return _Pair(
        name,
        a.norm().item(),
        b.norm().item(),
        (a - b).norm().item(),
        (a * b).sum().item(),
        max(1, a.numel()),
    )


def _tensors(
    engine: Path, plain: Path, name: str
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, the engine's, the plain one) in the model's order.

    What only one side has is compared with zeros.
    """
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
