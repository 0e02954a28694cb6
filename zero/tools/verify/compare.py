"""Compares the recordings of a run on the engine with one on plain torch, and says what differs
first.

This file reads the files that `zero.tools.verify.record` has written. It knows nothing about
engines or process groups.

[Note: tolerance] Sums in a different order differ by rounding. How much depends on the model, so it
is measured: a third run, again on plain torch, has weights that are disturbed by one unit in their
last place before each step. That changes how every later operation rounds, and amplifies or damps
it as the model does. (A run in fp64 would say the same, but a script feeds its model with fp32.) A
tensor of the engine may be `_MARGIN` times as far from the plain one as the disturbed one is. Where
that one came close by chance, the median over all tensors of its kind counts, and at least eps of
the dtype of the computation. Each distance is a 2-norm.

A gradient that rounding may change by its own size is noise, such as that of a key's bias in
attention. What follows from it is not compared. If most gradients are noise, the script has drawn
batches or dropout at random, and cannot be compared.

Adam turns the sign of a tiny gradient into a whole step, which makes the tolerance of its tensor's
update large. Signs do not change norms, so the norms of all updates, or of all tensors of one
state, are compared as well."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import starmap
from pathlib import Path
from statistics import median
from typing import Any

import torch

from zero.errors import UsageError

_MARGIN = 10
# Kinds of recorded tensors, beside gradients; those of the optimizer's states begin with `STATE`.
VALUE, STATE = "value", "state."


@dataclass
class Tensor:
    """One tensor of the three recordings: their norms, and the norms of the engine's and of the
    disturbed one's difference from the plain one.
    """

    name: str
    engine: float
    plain: float
    disturbed: float
    apart: float
    rounding: float

    @classmethod
    def of(cls, name: str, values: Sequence[torch.Tensor]) -> Tensor:
        engine, plain, disturbed = (value.double() for value in values)
        norms = (engine, plain, disturbed, engine - plain, disturbed - plain)
        return cls(name, *(each.norm().item() for each in norms))

    @property
    def relative(self) -> float:
        if self.apart == 0 or not (math.isfinite(self.engine) or math.isfinite(self.plain)):
            return 0.0
        return self.apart / self.plain if self.plain and math.isfinite(self.apart) else math.inf

    @property
    def relative_rounding(self) -> float:
        return self.rounding / self.plain if self.plain else 0.0

    @property
    def is_lost(self) -> bool:
        """The engine has zeros, which rounding does not explain."""
        return self.engine == 0 and self.apart > self.rounding

    @property
    def is_noise(self) -> bool:
        return 0 < self.plain <= _MARGIN * self.rounding and not self.is_lost

    def differs(self, usual: float) -> bool:
        """`usual`: the relative rounding of tensors of its kind."""
        if not math.isfinite(self.plain):
            return self.relative > 0
        limit = _MARGIN * max(self.rounding, usual * self.plain)
        return self.is_lost or self.apart > limit or math.isnan(self.engine)


@dataclass
class Compared:
    """Tensors of one kind, or losses or settings, of one step.

    Attributes:
        eps: the least relative rounding, 0 if they must be equal.
        noise: how many were left out as noise, None if this kind has none.
    """

    step: int
    kind: str
    tensors: list[Tensor]
    eps: float = 0.0
    noise: int | None = None

    @property
    def worst(self) -> Tensor:
        """The one with the largest relative difference."""
        return max(self.tensors, key=lambda tensor: tensor.relative)

    @cached_property
    def beyond(self) -> list[Tensor]:
        """Those that differ by more than rounding."""
        known = [tensor for tensor in self.tensors if math.isfinite(tensor.relative_rounding)]
        usual = max(self.eps, median([tensor.relative_rounding for tensor in known] or [0.0]))
        beyond = [
            each for each in self.tensors if (each.differs(usual) if self.eps else each.relative)
        ]
        if not beyond and self.noise is not None and self.kind != "gradient":
            if apart := _apart_together(known, self.eps):
                return [Tensor("all tensors together", 0, 1, 0, apart, 0)]
        return beyond

    def __str__(self) -> str:
        """What differs, by how much (the norm of the difference over the norm), and why."""
        first, others = self.beyond[0], len(self.beyond) - 1
        more = f", and {others} more" if others else ""
        where = "before the first step" if self.step == 0 else f"step {self.step}"
        what = first.name if self.kind == "setting" else f"{self.kind} of {first.name}"
        relative = first.relative
        by = f" (relative difference {relative:.2g})" if math.isfinite(relative) else ""
        return f"{where}: {what} differs{by}{more}.\n  {self.cause}"

    @property
    def cause(self) -> str:
        """What is known for certain about the difference."""
        kind, tensors = self.kind, self.tensors
        if kind == "value":
            return "The engine has changed them."
        if kind == "setting":
            first = self.beyond[0]
            return f"It is {first.engine:g} on the engine and {first.plain:g} on plain torch."
        if lost := [tensor.name for tensor in tensors if tensor.is_lost]:
            names = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
            if kind == "update":
                return f"The step has not changed {names}."
            return f"The engine has no {kind} for {names}."
        pairs = [tensor for tensor in tensors if tensor.plain > 0]
        ratios = [each.engine / each.plain for each in pairs]
        explained = all(abs(each.engine - each.plain) >= 0.98 * each.apart for each in pairs)
        if len(pairs) > 1 and explained and max(ratios) - min(ratios) <= 0.01 * max(ratios):
            return f"All tensors of this kind are {median(ratios):.4g} times the plain ones."
        return "Everything compared before it, in the rows above, is equal within rounding."


@dataclass
class Result:
    """`skipped`: how many steps both runs skipped, because gradients were not finite."""

    rows: list[Compared] = field(default_factory=list)
    skipped: int = 0

    @property
    def difference(self) -> Compared | None:
        """The last row, if it differs."""
        return self.rows[-1] if self.rows and self.rows[-1].beyond else None


def compare(engine: Path, plain: Path, disturbed: Path) -> Result:
    """Compare the recordings in these folders, step by step, up to the first difference beyond
    rounding.

    Raises UsageError if they cannot be compared: the script draws batches at random, or overflows
    decide.
    """
    folders, result = (engine, plain, disturbed), Result()
    steps = steps_in(*folders)
    for step in range(steps + 1):
        done = [json.loads((folder / f"{step}.json").read_text()) for folder in folders]
        for compared in filter(lambda each: each.tensors, _compared(folders, step, done)):
            result.rows.append(compared)
            if compared.beyond:
                return result
        result.skipped += step > 0 and not any(each["applied"] for each in done[:2])
    if result.skipped == steps:
        raise UsageError(
            f"verify: no update was compared, because gradients were not finite in any of {steps} "
            "step(s): lower fp16.initial_scale_power, or raise --steps"
        )
    return result


def steps_in(*folders: Path) -> int:
    """How many steps all recordings have."""
    count = 0
    while all((folder / f"{count + 1}.json").exists() for folder in folders):
        count += 1
    return count


def _compared(
    folders: Sequence[Path], step: int, done: Sequence[dict[str, Any]]
) -> Iterator[Compared]:
    """What of a step is compared, one after the other. Step 0 is before the first one.

    folders: the recordings of the runs on the engine, on plain torch, and on plain torch with
    disturbed weights. done: what their `N.json` say.
    """

    def of(kind: str) -> list[Tensor]:
        return list(starmap(Tensor.of, _tensors(folders, f"{step}.{kind}")))

    if step == 0:
        start = of(VALUE)
        _require_equal(not any(tensor.rounding for tensor in start))
        yield Compared(step, VALUE, start)
        return
    if done[1]["applied"] != done[2]["applied"]:
        raise UsageError(
            f"verify: rounding alone decides whether step {step} overflows: lower "
            "fp16.initial_scale_power"
        )
    gradients, eps = of("gradient"), done[0]["eps"]
    loud = {tensor.name: tensor for tensor in gradients if not tensor.is_noise}
    noise = len(gradients) - len(loud)
    _require_equal(2 * noise <= len(gradients))
    yield Compared(step, "loss", of("loss"), eps)
    yield Compared(step, "gradient", list(loud.values()), eps, noise)
    yield Compared(step, "setting", of("setting"))
    # Each side adds up millions of squares in fp32, in its own order.
    of_sum = math.sqrt(torch.finfo(torch.float32).eps) / _MARGIN
    yield Compared(step, "norm", of("norm"), of_sum)
    for file in sorted(folders[0].glob(f"{step}.{STATE}*")):
        if (folders[1] / file.name).exists():
            key = file.stem.partition(STATE)[2]
            states = [tensor for tensor in of(f"{STATE}{key}") if tensor.name in loud]
            yield Compared(step, key, states, eps, noise)
    old = dict(_tensors(folders, f"{step - 1}.{VALUE}"))
    updates = [
        Tensor.of(name, [new - before for new, before in zip(values, old[name], strict=True)])
        for name, values in _tensors(folders, f"{step}.{VALUE}")
        if name in loud
    ]
    yield Compared(step, "update", updates, done[0]["eps_of_update"], noise)


def _tensors(folders: Sequence[Path], name: str) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Names and the three recordings' tensors. What only some have is compared with zeros, but for
    numbers, which are left out.
    """
    files = [torch.load(folder / f"{name}.pt", mmap=True) for folder in folders]
    for key in files[1] | files[0] | files[2]:
        some = next(file[key] for file in files if key in file)
        if some.dim() or all(key in file for file in files):
            yield key, [file[key] if key in file else torch.zeros_like(some) for file in files]


def _require_equal(are_equal: bool) -> None:
    """Refuse a script whose two runs on plain torch are not equal."""
    if not are_equal:
        raise UsageError(
            "verify: two runs on plain torch differ by as much as the one on the engine: the "
            "script draws weights, batches or dropout at random: set a seed in it, or verify in "
            "fp32"
        )


def _apart_together(tensors: list[Tensor], eps: float) -> float:
    """How far the ratio of the norms of all tensors is from 1, or 0 if rounding explains it."""
    engine, plain, disturbed = (
        math.hypot(*(getattr(tensor, side) for tensor in tensors))
        for side in ("engine", "plain", "disturbed")
    )
    if not (plain and math.isfinite(engine + plain + disturbed)):
        return 0.0
    single = [abs(tensor.disturbed / tensor.plain - 1) for tensor in tensors if tensor.plain]
    rounding = max(abs(disturbed / plain - 1), median(single), eps)
    apart = abs(engine / plain - 1)
    return apart if apart > _MARGIN * rounding else 0.0
