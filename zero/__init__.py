"""A ZeRO engine on `torch.distributed` alone.

In a training loop of your own, begin with `initialize`. Under transformers and accelerate, start
the script with `zero run`, or see `zero.hf.enable`.
"""

from zero import fragments
from zero.engine import ZeroEngine
from zero.gathered_parameters import GatheredParameters
from zero.init import Init
from zero.integrations.deepspeed import labels, leaf
from zero.integrations.deepspeed.engine import initialize
from zero.integrations.deepspeed.leaf import (
    register_external_parameter,
    unregister_external_parameter,
)
from zero.streaming import GatheredWhenRead, stream_weights

__version__ = "0.1.0"

labels.register()

__all__ = [
    "GatheredParameters",
    "GatheredWhenRead",
    "Init",
    "ZeroEngine",
    "fragments",
    "initialize",
    "leaf",
    "register_external_parameter",
    "stream_weights",
    "unregister_external_parameter",
]
