"""A ZeRO engine on `torch.distributed` alone. See `zero.hf.enable` for use under transformers and accelerate."""

import os

from zero.deepspeed import fragments, labels, leaf, tiling
from zero.deepspeed.engine import initialize
from zero.engine import ZeroEngine
from zero.gathered import GatheredParameters
from zero.init import Init
from zero.layout import register_external_parameter, unregister_external_parameter
from zero.streaming import stream_weights

__version__ = "0.1.0"

labels.register()

if "ZERO_VERIFY_MODE" in os.environ:  # this process was started by `zero verify`
    from zero.verify import record

    record.set_up()
elif "ZERO_WATCH" in os.environ:  # by `zero trace` or `zero memory`
    from zero.watch import recorder

    recorder.set_up()

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroEngine",
    "fragments",
    "initialize",
    "leaf",
    "register_external_parameter",
    "stream_weights",
    "tiling",
    "unregister_external_parameter",
]
