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
batches or dropout at random. Adam turns the sign of a tiny gradient into a whole step, which makes
the tolerance of its tensor's update large. Signs do not change norms, so the norms of all updates,
or of all tensors of one state, are compared as well."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from safetensors import safe_open

_MARGIN = 10
_RANDOM = (
    "Two runs on plain torch differ by as much: the script draws {what} at random. Set a seed in it"
)


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
        by = f" (relative difference {self.relative:.2g})" if math.isfinite(self.relative) else ""
        return f"{where}: {what} differs{by}{more}.\n  {self.cause}"


class Row(NamedTuple):
    """What was compared: how many tensors, how many were left out as noise, and the largest
    relative difference, which is that of `tensor`.
    """

    step: int
    kind: str
    tensors: int
    noise: int
    largest: float
    tensor: str


@dataclass
class Result:
    """`skipped`: how many steps both runs skipped, because gradients were not finite: then there is
    little to compare. `unsure`: a step that overflows or not by rounding alone, at which the
    comparison ended, or 0.
    """

    rows: list[Row] = field(default_factory=list)
    difference: Difference | None = None
    skipped: int = 0
    unsure: int = 0


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


def compare(engine: Path, plain: Path, disturbed: Path) -> Result:
    """Compare the recordings in these folders, step by step, up to the first difference beyond
    rounding.
    """
    comparison = Comparison((engine, plain, disturbed))
    result = comparison.result
    is_done = comparison.differs_at_start()
    for step in range(1, steps_in(engine, plain, disturbed) + 1):
        is_done = is_done or comparison.differs(step) or bool(result.unsure)
    return result


def steps_in(*folders: Path) -> int:
    """How many steps all recordings have."""
    count = 0
    while all((folder / f"{count + 1}.json").exists() for folder in folders):
        count += 1
    return count


class Compared(NamedTuple):
    """Tensors of one kind. `eps`: the least relative rounding, 0 if they must be equal. `is_noisy`:
    noise has been left out.
    """

    kind: str
    tensors: list[Tensor]
    eps: float = 0.0
    is_noisy: bool = False


class Comparison:
    """`folders`: of the run on the engine, on plain torch, and on plain torch with disturbed
    weights.
    """

    def __init__(self, folders: Sequence[Path]):
        self.folders = folders
        self.result = Result()
        facts = json.loads((folders[0] / "facts.json").read_text())
        self.eps = torch.finfo(getattr(torch, facts["dtype"])).eps
        # Optimizers of whole tensors, such as Muon, compute in bf16.
        of_update = torch.float32 if facts["elementwise"] else torch.bfloat16
        self.eps_of_update = torch.finfo(of_update).eps
        self.names = json.loads((folders[1] / "facts.json").read_text())["names"]

    def differs_at_start(self) -> bool:
        values = [Tensor.of(*each) for each in self._tensors("start")]
        is_random = any(tensor.rounding for tensor in values)
        cause = _RANDOM.format(what="them") if is_random else "The engine has changed them"
        return self._judge(0, Compared("value", values), f"{cause}.")

    def differs(self, step: int) -> bool:
        """Add the rows of this step, up to one with a difference."""
        done = [json.loads((folder / f"{step}.json").read_text()) for folder in self.folders]
        if done[1]["applied"] != done[2]["applied"]:
            self.result.unsure = step
            return True
        self.result.skipped += not (done[0]["applied"] or done[1]["applied"])
        gradients = [Tensor.of(*each) for each in self._tensors(f"{step}.gradients")]
        noise = [tensor for tensor in gradients if tensor.is_noise]
        if 2 * len(noise) > len(gradients):
            cause = _RANDOM.format(what="batches or dropout") + ", or verify in fp32."
            self._add(step, Compared("gradient", noise))
            self._differs(step, "gradient", noise, cause)
            return True
        loud = {tensor.name: tensor for tensor in gradients if not tensor.is_noise}
        compared = self._compared(step, done, loud)
        return any(self._judge(step, each, noise=len(noise)) for each in compared)

    def _compared(
        self, step: int, done: list[dict], gradients: dict[str, Tensor]
    ) -> Iterator[Compared]:
        """What of a step is compared, one after the other. `gradients`: those that are no noise."""
        eps = torch.finfo(torch.float32).eps
        yield Compared("loss", _numbers(done, "loss"), self.eps)
        yield Compared("gradient", list(gradients.values()), self.eps, is_noisy=True)
        yield Compared("setting", _numbers(done, "setting"))
        # Each side adds up millions of squares in fp32, in its own order.
        yield Compared("norm", _numbers(done, "norm"), math.sqrt(eps) / _MARGIN)
        for file in sorted(self.folders[0].glob(f"{step}.state.*")):
            if (self.folders[1] / file.name).exists():
                recorded = self._tensors(file.stem)
                states = [Tensor.of(name, each) for name, each in recorded if name in gradients]
                yield Compared(file.stem.split(".", 2)[2], states, eps, is_noisy=True)
        before = self._tensors("start" if step == 1 else f"{step - 1}.values")
        updates = [
            Tensor.of(name, [new - old for new, old in zip(values, old_values, strict=True)])
            for (name, values), (_, old_values) in zip(
                self._tensors(f"{step}.values"), before, strict=True
            )
            if name in gradients
        ]
        yield Compared("update", updates, self.eps_of_update, is_noisy=True)

    def _judge(self, step: int, compared: Compared, cause: str = "", noise: int = 0) -> bool:
        """Add a row. If something differs beyond rounding, say so; True then."""
        kind, tensors, eps, is_noisy = compared
        if not tensors:
            return False
        known = [tensor for tensor in tensors if math.isfinite(tensor.relative_rounding)]
        usual = max(eps, median([tensor.relative_rounding for tensor in known] or [0.0]))
        self._add(step, compared, noise if is_noisy else 0)
        beyond = [each for each in tensors if (each.differs(usual) if eps else each.relative > 0)]
        is_together = is_noisy and kind != "gradient"
        if not beyond and is_together and (apart := _apart_together(known, eps)):
            beyond = [Tensor("all tensors together", 0, 1, 0, apart, 0)]
        if beyond:
            self._differs(step, kind, beyond, cause or _cause(kind, beyond, tensors))
        return bool(beyond)

    def _differs(self, step: int, kind: str, tensors: list[Tensor], cause: str) -> None:
        first, others = tensors[0], len(tensors) - 1
        self.result.difference = Difference(step, kind, first.name, first.relative, others, cause)

    def _add(self, step: int, compared: Compared, noise: int = 0) -> None:
        worst = max(compared.tensors, key=lambda tensor: tensor.relative)
        row = Row(step, compared.kind, len(compared.tensors), noise, worst.relative, worst.name)
        self.result.rows.append(row)

    def _tensors(self, name: str) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Names and the three recordings' tensors, in the model's order.

        What only some have is compared with zeros.
        """
        files = [safe_open(folder / f"{name}.safetensors", "pt") for folder in self.folders]
        known = [set(file.keys()) for file in files]
        for key in self.names:
            values = [
                file.get_tensor(key) if key in names else None
                for file, names in zip(files, known, strict=True)
            ]
            some = next((value for value in values if value is not None), None)
            if some is not None:
                zeros = torch.zeros_like(some)
                yield key, [zeros if value is None else value for value in values]


def _numbers(done: list[dict], kind: str) -> list[Tensor]:
    """The numbers of this kind that all recordings have."""
    names = [name for name in done[1][kind] if all(name in each[kind] for each in done)]
    return [
        Tensor.of(name, [torch.tensor(float(each[kind][name])) for each in done]) for name in names
    ]


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


def _cause(kind: str, beyond: list[Tensor], tensors: list[Tensor]) -> str:
    """What is known for certain about a difference."""
    if kind == "setting":
        first = beyond[0]
        return f"It is {first.engine:g} on the engine and {first.plain:g} on plain torch."
    if lost := [tensor.name for tensor in tensors if tensor.is_lost]:
        names = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        if kind == "update":
            return f"The step has not changed {names}."
        return f"The engine has no {kind} for {names}."
    pairs = [tensor for tensor in tensors if tensor.plain > 0]
    ratios = [tensor.engine / tensor.plain for tensor in pairs]
    explained = all(abs(tensor.engine - tensor.plain) >= 0.98 * tensor.apart for tensor in pairs)
    if len(pairs) > 1 and explained and max(ratios) - min(ratios) <= 0.01 * max(ratios):
        return f"All tensors of this kind are {median(ratios):.4g} times the plain ones."
    return "Everything compared before it, in the rows above, is equal within rounding."
