"""DeepSpeed's classes around a configuration.

What a key means, and its default, is in `zero.config`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from zero.config import ZeroConfig
from zero.config.reading import rename_deprecated
from zero.errors import UsageError
from zero.optim.relocation import STATES

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
        data, _, problems = rename_deprecated({"zero_optimization": settings})
        for key, problem in problems.items():
            raise UsageError(f"{key}: {problem}")
        super().__init__(**data["zero_optimization"])
