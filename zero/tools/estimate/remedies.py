"""Finds changes with which a training run fits. The change with the fastest step comes first.

A slower change is also named if it needs less memory than all faster ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import transformers

from zero.config import Config
from zero.config.settings import ZeroConfig
from zero.core.layout import packs_experts
from zero.errors import UsageError
from zero.tools.estimate.machine import HOST
from zero.tools.estimate.question import Question
from zero.tools.estimate.rank import Estimate, estimate

# The largest number of remedies that are named. A slower one is named if it needs at most this
# fraction of the others' memory.
MOST, LESS = 5, 0.9
NO_OFFLOAD = {"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}
FEW_LIVE = {"stage": 3, "stage3_max_live_parameters": 0}
# The Trainer would fill in "auto".
SLICES = {"activation_checkpointing": {"batch_slices": "Auto", "cpu_checkpointing": True}}

Keys = dict[str, Any]  # of a section
Sections = dict[str, Keys]  # the keys to set in each section


@dataclass
class Remedy:
    """The keys that are changed, all changes in words, and the estimate with them."""

    sections: Sections
    question: Question
    changes: list[str]
    found: Estimate

    @property
    def words(self) -> str:
        return ", ".join(self.changes)

    @property
    def seconds(self) -> float:
        """The time of a step with two digits. Smaller differences are less than what is assumed."""
        return float(f"{self.found.seconds:.1e}")


class Search:
    """Searches stages, offload and micro-batches that fit, with and without gradient checkpointing.

    Micro-batches have half the size, a quarter and so on. A step keeps its number of sequences.
    Where parameters are offloaded, so that each micro-batch fetches them again, the whole batch is
    also tried in slices.

    Args:
        limits: bytes by place ("device", "host").
        show: is told what is tried, before it takes its time.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        config: Config,
        question: Question,
        limits: Mapping[str, int],
        show: Callable[[str], object] = lambda text: None,
    ):
        self.model = model
        self.config = config
        self.question = question
        self.limits = limits
        self._show = show
        self._tried: dict[tuple[str, int, bool], Remedy | None] = {}
        self._batches = list(_halves(question.batch))
        asked, can_checkpoint = question.checkpointing, model.supports_gradient_checkpointing
        # The one that needs less memory comes first.
        tried = {asked, asked or bool(question.batch and can_checkpoint)}
        self._checkpointing = sorted(tried, reverse=True)

    @cached_property
    def found(self) -> Estimate:
        """The run as asked for. Raises UsageError as `estimate` does."""
        batch, checkpointing = self.question.batch, self.question.checkpointing
        remedy = self._estimated({}, batch, checkpointing)
        self._tried["{}", batch, checkpointing] = remedy
        return remedy.found

    def fits(self, found: Estimate) -> bool:
        return all(found.total(place) <= most for place, most in self.limits.items())

    def remedies(self) -> list[Remedy]:
        """Return the changes with which it fits, ordered by the predicted time of a step."""
        changes = _new(_smaller(self.config.zero_optimization, HOST in self.limits), self.config)
        divided = _new(({"stage": stage} for stage in (1, 2, 3)), self.config)
        for parts in self._parts():
            experts = {"expert_parallel": {"enabled": True, "autoep_size": parts}}
            changes += [sections | experts for sections in divided]
        return _undominated(self._enough(changes), self.limits)

    def _parts(self) -> list[int]:
        """In how many parts experts may be divided, over processes of one machine."""
        model: Any = self.model
        others = self.config.tensor_parallel.autotp_size > 1 or self.config.expert_parallel.enabled
        if others or not getattr(model, "ep_plan", None):
            return []
        found = [module.num_experts for module in model.modules() if packs_experts(module)]
        most = math.gcd(self.question.world_size, self.question.per_host, *found)
        return [parts for parts in range(2, most + 1) if most % parts == 0]

    def _enough(self, changes: Iterable[Sections]) -> Iterator[Remedy]:
        """Return the changes that fit, each with the largest micro-batch that fits."""
        for sections in changes:
            for checkpointing in self._checkpointing:
                fitting = partial(self._fitting, sections, checkpointing)
                if fitting(self._batches[-1]) is None:
                    break  # with more in a micro-batch, or no checkpointing, it would need more

                def fits(batch: int, fitting: Callable[[int], object] = fitting) -> bool:
                    return fitting(batch) is not None

                if found := fitting(self._batches[bisect_left(self._batches, True, key=fits)]):
                    yield found
            if self._may_be_sliced(sections):
                if found := self._fitting(sections | SLICES, False, self._batches[0]):
                    yield found

    def _may_be_sliced(self, sections: Sections) -> bool:
        given = self.config.zero_optimization.offload_param
        unchanged = {"device": given.device if given else "none"}
        place = sections.get("zero_optimization", {}).get("offload_param", unchanged)
        is_sliced = self.config.activation_checkpointing.batch_slices
        return place["device"] != "none" and self._batches[0] > 1 and not is_sliced

    def _fitting(self, sections: Sections, checkpointing: bool, batch: int) -> Remedy | None:
        """Return the change if it fits."""
        tried = self._try(sections, batch, checkpointing)
        return tried if tried and self.fits(tried.found) else None

    def _try(self, sections: Sections, batch: int, checkpointing: bool) -> Remedy | None:
        """Return the change, whether it fits or not. None if the engine refuses it in combination
        with other keys.
        """
        key = str(sections), batch, checkpointing
        if key not in self._tried:
            try:
                self._tried[key] = self._estimated(sections, batch, checkpointing)
            except UsageError:
                self._tried[key] = None
        return self._tried[key]

    def _estimated(self, sections: Sections, batch: int, checkpointing: bool) -> Remedy:
        asked, config, updates = self.question, self.config, dict[str, Any]()
        changes = [words for keys in sections.values() for words in map(_in_words, keys.items())]
        for name, keys in sections.items():
            section = getattr(config, name)
            given = section.model_dump(exclude_unset=True)
            updates[name] = type(section).model_validate(given | keys)
        if batch != asked.batch:
            steps = asked.batch * (config.gradient_accumulation_steps or 1) // batch
            updates["gradient_accumulation_steps"] = steps
            changes.append(f"micro-batch {batch}, gradient_accumulation_steps {steps}")
        if checkpointing != asked.checkpointing:
            changes.append(f"{'' if checkpointing else 'no '}gradient checkpointing")
        changes = list(filter(None, changes))
        tried = ", ".join(changes) or "the configuration as it is"
        self._show(f"trying number {len(self._tried) + 1}: {tried}")
        question = replace(asked, batch=batch, checkpointing=checkpointing)
        found = estimate(self.model, config.model_copy(update=updates), question)
        return Remedy(sections, question, changes, found)


def _halves(batch: int) -> Iterator[int]:
    """Return the size, its half and so on while that is an integer, and finally 1."""
    yield batch
    while batch > 1:
        batch = batch // 2 if batch % 2 == 0 else 1
        yield batch


def _smaller(zero: ZeroConfig, host_is_limited: bool) -> Iterator[Keys]:
    """Return changes after which a run may fit, starting with none. Files only help against too
    little host memory.
    """
    yield {}
    yield NO_OFFLOAD
    for stage in range(zero.stage + 1, 4):
        yield {"stage": stage}
    yield FEW_LIVE
    known = [each.nvme_path for each in (zero.offload_optimizer, zero.offload_param) if each]
    cpu = {"device": "cpu", "pin_memory": True}
    nvme = {"device": "nvme", "pin_memory": True, "nvme_path": next(filter(None, known), ".")}
    for place in (cpu, nvme) if host_is_limited else (cpu,):
        optimizer = {"offload_optimizer": place}
        yield {"stage": zero.stage or 2} | optimizer
        yield {"stage": 3} | optimizer
        yield FEW_LIVE | optimizer | {"offload_param": cpu}
        if place is nvme:
            least = nvme | {"max_in_cpu": 0}
            yield FEW_LIVE | optimizer | {"offload_param": least}
            optimizer = {"offload_optimizer": least | {"pipeline_read": False}}
            yield FEW_LIVE | optimizer | {"offload_param": least}


def _new(changes: Iterable[Keys], config: Config) -> list[Sections]:
    """Return the different changes of zero_optimization, without what it has already."""
    zero, found = config.zero_optimization, []

    def is_given(key: str, value: Any) -> bool:
        given = getattr(zero, key)
        if isinstance(value, dict):
            now = given.model_dump() if given else {"device": "none"}
            where = "nvme_path", "pin_memory"
            return all(now.get(name) == each for name, each in value.items() if name not in where)
        return value == given

    for keys in changes:
        left = {key: value for key, value in keys.items() if not is_given(key, value)}
        new = {"zero_optimization": left} if left else {}
        if new not in found:
            found.append(new)
    return found


def _in_words(key_and_value: tuple[str, Any]) -> str:
    key, value = key_and_value
    if isinstance(value, dict):
        return f"no {key}" if value["device"] == "none" else f"{key} to {value['device']}"
    if key == "enabled":
        return ""
    return key if value is True or value == "Auto" else f"{key} {value}"


def _undominated(found: Iterable[Remedy], limits: Mapping[str, int]) -> list[Remedy]:
    """Keep those that need less memory than all faster ones. Of equally fast ones, the first is the
    one with the fewest changes.
    """
    named: list[Remedy] = []
    least = math.inf
    for remedy in sorted(found, key=lambda remedy: (remedy.seconds, len(remedy.changes))):
        fullest = max(remedy.found.total(place) / most for place, most in limits.items())
        if fullest <= LESS * least:
            named.append(remedy)
            least = fullest
    return named[:MOST]
