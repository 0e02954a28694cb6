"""DeepSpeed's classes around a configuration.

What a key means, and its default, is in `zero.config`.
"""

from __future__ import annotations

from enum import Enum

from zero.optim.placement import STATES

# The values of `device` in the offload sections, and what `engine.offload_states` takes, as
# enumerations.
OffloadDeviceEnum = Enum(
    "OffloadDeviceEnum", {name: name for name in ("none", "cpu", "nvme")}, type=str
)
OffloadStateTypeEnum = Enum("OffloadStateTypeEnum", {name: name for name in STATES}, type=str)
