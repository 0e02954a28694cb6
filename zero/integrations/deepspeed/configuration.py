"""DeepSpeed's classes around a configuration.

What a key means, and its default, is in `zero.config`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from zero.config import ZeroConfig
from zero.config.idle import IDLE_KEYS
from zero.config.load import rename_old
from zero.errors import UsageError
from zero.optim.placement import STATES

# The values of `device` in the offload sections, and what `engine.offload_states` takes, as
# enumerations.
OffloadDeviceEnum = Enum(
    "OffloadDeviceEnum", {name: name for name in ("none", "cpu", "nvme")}, type=str
)
OffloadStateTypeEnum = Enum("OffloadStateTypeEnum", {name: name for name in STATES}, type=str)


class DeepSpeedZeroConfig(ZeroConfig):
    """`zero_optimization` as a class of its own, which takes old names of keys too.

    Raises UsageError for an old name whose value cannot be converted, or beside the new name.
    """

    def __init__(self, **settings: Any):
        data, _, problems = rename_old({"zero_optimization": settings})
        for key, problem in problems.items():
            raise UsageError(f"{key}: {problem}")
        section = data["zero_optimization"]
        acting = [name for name in section if f"zero_optimization.{name}" not in IDLE_KEYS]
        super().__init__(**{name: section[name] for name in acting})
