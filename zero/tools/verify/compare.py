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
batches or dropout at random. Adam turns the sign of a tiny gradient into a whole step, so updates
are compared where a gradient is `_MARGIN` times as large as its tensor's rounding. Signs do not
change norms, so the norms of all updates, or of all tensors of one state, are compared as well.
Elements that have had no gradient so far change by weight decay alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from safetensors import safe_open

_MARGIN = 10
# Settings of a param group that say how to compute. The engine decides them.
_HOW = {"foreach", "fused", "capturable", "differentiable"}
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


@dataclass
class Result:
    """Rows: (step, kind, tensors compared, tensors left out as noise, largest relative difference,
    its tensor).

    skipped: how many steps both runs skipped, because gradients were not finite: then there is
    little to compare. unsure: a step that overflows or not by rounding alone, at which the
    comparison ended, or 0."""

    rows: list[tuple[int, str, int, int, float, str]] = field(default_factory=list)
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
    comparison.compare_start()
    result = comparison.result
    for step in range(1, steps_in(engine, plain, disturbed) + 1):
        if result.difference is None and not result.unsure:
            comparison.compare_step(step)
    return result


def steps_in(*folders: Path) -> int:
    """How many steps all recordings have."""
    count = 0
    while all((folder / f"{count + 1}.json").exists() for folder in folders):
        count += 1
    return count


class Comparison:
    """`folders`: of the run on the engine, on plain torch, and on plain torch with disturbed
    weights.
    """

    def __init__(self, folders: Sequence[Path]):
        self.folders = folders
        self.result = Result()
        facts = json.loads((folders[0] / "facts.json").read_text())
        self.eps = torch.finfo(getattr(torch, facts["dtype"])).eps
        self.elementwise = facts["elementwise"]

    def compare_start(self) -> None:
        values = [Tensor.of(*each) for each in self._tensors("start")]
        is_random = any(tensor.rounding for tensor in values)
        cause = _RANDOM.format(what="them") if is_random else "The engine has changed them"
        self._judge(0, "value", values, 0.0, cause=f"{cause}.")

    def compare_step(self, step: int) -> None:
        done = [json.loads((folder / f"{step}.json").read_text()) for folder in self.folders]
        if self._judge(step, "loss", list(_losses(done)), self.eps):
            return
        gradients = [Tensor.of(*each) for each in self._tensors(f"{step}.gradients")]
        noise = [tensor for tensor in gradients if tensor.is_noise]
        if 2 * len(noise) > len(gradients):
            self._add(step, "gradient", [noise[0]], len(noise) - 1)
            relative, others = noise[0].relative_rounding, len(noise) - 1
            cause = _RANDOM.format(what="batches or dropout") + ", or verify in fp32."
            found = Difference(step, "gradient", noise[0].name, relative, others, cause)
            self.result.difference = found
            return
        if self._judge(step, "gradient", gradients, self.eps):
            return
        if self._compare_settings(step, done):
            return
        eps = torch.finfo(torch.float32).eps  # in which both sides compute from here on
        # Each side adds up millions of squares in fp32, in its own order.
        norms = Tensor.of("all gradients", [torch.tensor(each["norm"]) for each in done])
        if self._judge(step, "norm", [norms], math.sqrt(eps) / _MARGIN):
            return
        names = {tensor.name for tensor in gradients if not tensor.is_noise}
        for file in sorted(self.folders[0].glob(f"{step}.state.*")):
            if not (self.folders[1] / file.name).exists():
                continue
            states = [Tensor.of(*each) for each in self._tensors(file.stem) if each[0] in names]
            kind = file.stem.split(".", 2)[2]
            if self._judge(step, kind, states, eps, len(noise), together=True):
                return
        updates, decays = self._updates(step, {tensor.name: tensor for tensor in gradients})
        if self.elementwise and self._judge(step, "decay", decays, eps):
            return
        # Optimizers of whole tensors, such as Muon, compute in bf16.
        if not self.elementwise:
            eps = torch.finfo(torch.bfloat16).eps
        self._judge(step, "update", updates, eps, len(noise), together=True)

    def _compare_settings(self, step: int, done: list[dict]) -> bool:
        """The settings of a step: whether it was skipped, the loss scale, and the numbers of the
        param groups.
        """
        if done[1]["applied"] != done[2]["applied"]:
            self.result.unsure = step
            return True
        engine, plain, _ = map(_settings, done)
        common = [name for name in plain if name in engine]
        different = [name for name in common if engine[name] != plain[name]]
        first = (different or common)[0]
        row = (step, "setting", len(common), 0, float(bool(different)), first)
        self.result.rows.append(row)
        if different:
            cause = f"It is {engine[first]} on the engine and {plain[first]} on plain torch."
            others = len(different) - 1
            found = Difference(step, "setting", first, math.inf, others, cause)
            self.result.difference = found
        self.result.skipped += not done[0]["applied"]
        return bool(different)

    def _updates(
        self, step: int, gradients: dict[str, Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What the step has changed where a gradient is not noise, and where there has been none so
        far.

        A third of GPT-2's `c_attn.bias` is noise. Tokens that no batch had have no gradient in an
        embedding."""
        updates, decays = [], []
        files = ["start" if step == 1 else f"{step - 1}.values", f"{step}.values"]
        files += [f"{number}.gradients" for number in range(step, 0, -1)]
        recorded = (self._tensors(file) for file in files)
        for (name, before), (_, after), *of_steps in zip(*recorded, strict=True):
            changed = [new - old for new, old in zip(after, before, strict=True)]
            has_none = torch.stack(
                [(engine == 0) & (plain == 0) for _, (engine, plain, _) in of_steps]
            ).all(0)
            if has_none.any():
                decays.append(Tensor.of(name, [has_none * values for values in changed]))
            if not gradients[name].is_noise:
                plain = of_steps[0][1][1]
                rounding = gradients[name].rounding / math.sqrt(plain.numel())
                is_loud = plain.abs() > _MARGIN * rounding
                updates.append(Tensor.of(name, [is_loud * values for values in changed]))
        return updates, decays

    def _judge(
        self,
        step: int,
        kind: str,
        tensors: list[Tensor],
        eps: float,
        noise: int = 0,
        together: bool = False,
        cause: str = "",
    ) -> bool:
        """Add a row. If a tensor differs beyond rounding, say so; True then.

        `eps`: the least relative rounding, 0 if the tensors must be equal. `together`: compare the
        norm of all tensors, too.
        """
        if not tensors:
            return False
        known = [tensor for tensor in tensors if math.isfinite(tensor.relative_rounding)]
        usual = max(eps, median([tensor.relative_rounding for tensor in known] or [0.0]))
        if kind == "gradient":
            noise = sum(tensor.is_noise for tensor in tensors)
        self._add(step, kind, tensors, noise)
        beyond = [each for each in tensors if (each.differs(usual) if eps else each.relative > 0)]
        if not beyond and together and (apart := _apart_together(known, eps)):
            beyond = [Tensor("all tensors together", 0, 1, 0, apart, 0)]
        if beyond:
            first, *others = beyond
            cause = cause or _cause(kind, tensors)
            found = Difference(step, kind, first.name, first.relative, len(others), cause)
            self.result.difference = found
        return bool(beyond)

    def _add(self, step: int, kind: str, tensors: list[Tensor], noise: int) -> None:
        compared = [tensor for tensor in tensors if kind != "gradient" or not tensor.is_noise]
        worst = max(compared or tensors, key=lambda tensor: tensor.relative)
        row = (step, kind, len(compared), noise, worst.relative, worst.name)
        self.result.rows.append(row)

    def _tensors(self, name: str) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Names and the three recordings' tensors, in the model's order.

        What only some have is compared with zeros.
        """
        files = [safe_open(folder / f"{name}.safetensors", "pt") for folder in self.folders]
        known = [set(file.keys()) for file in files]
        for key in json.loads((self.folders[1] / "facts.json").read_text())["names"]:
            values = [
                file.get_tensor(key) if key in names else None
                for file, names in zip(files, known, strict=True)
            ]
            some = next((value for value in values if value is not None), None)
            if some is not None:
                zeros = torch.zeros_like(some)
                yield key, [zeros if value is None else value for value in values]


def _losses(done: list[dict]) -> Iterator[Tensor]:
    for rank, of_rank in enumerate(zip(*(each["losses"] for each in done), strict=True)):
        for micro_batch, losses in enumerate(zip(*of_rank, strict=False)):
            name = f"micro-batch {micro_batch} on rank {rank}"
            yield Tensor.of(name, [torch.tensor(loss) for loss in losses])


def _settings(done: dict) -> dict[str, object]:
    settings: dict[str, object] = {"whether the step was skipped": not done["applied"]}
    settings["the loss scale"] = done["scale"]
    for number, group in enumerate(done["groups"]):
        for key, value in group.items():
            if key not in _HOW:
                settings[f"{key} of param group {number}"] = value
    return settings


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


def _cause(kind: str, tensors: list[Tensor]) -> str:
    """What is known for certain about a difference."""
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
    if kind == "decay":
        return "These elements have had no gradient yet, so only weight decay may change them."
    return "Everything compared before it, in the rows above, is equal within rounding."
