"""A ZeRO engine on `torch.distributed` alone.

In a training loop of your own, begin with `initialize`. Under transformers and accelerate, start
the script with `zero run`, or see `zero.hf.enable`.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from zero.lazy import loader

if TYPE_CHECKING:
    from zero import fragments as fragments
    from zero.engine import ZeroEngine as ZeroEngine
    from zero.gathered_parameters import GatheredParameters as GatheredParameters
    from zero.init import Init as Init
    from zero.integrations.deepspeed import leaf as leaf
    from zero.integrations.deepspeed.engine import initialize as initialize
    from zero.integrations.deepspeed.leaf import (
        register_external_parameter as register_external_parameter,
    )
    from zero.integrations.deepspeed.leaf import (
        unregister_external_parameter as unregister_external_parameter,
    )
    from zero.streaming import GatheredWhenRead as GatheredWhenRead
    from zero.streaming import stream_weights as stream_weights

__version__ = "0.1.0"

_LEAF = "zero.integrations.deepspeed.leaf"
_HOMES = {
    "GatheredParameters": "zero.gathered_parameters",
    "Init": "zero.init",
    "ZeroEngine": "zero.engine",
    "fragments": "zero.fragments",
    "initialize": "zero.integrations.deepspeed.engine",
    "leaf": _LEAF,
    **dict.fromkeys(("register_external_parameter", "unregister_external_parameter"), _LEAF),
    **dict.fromkeys(("GatheredWhenRead", "stream_weights"), "zero.streaming"),
}
__all__ = tuple(_HOMES)
_load = loader(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        importlib.import_module("zero.integrations.deepspeed.labels").register()
    return _load(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


# Where `zero verify` or `zero trace` names what records this process.
if _recorder := os.environ.get("ZERO_RECORDER"):
    importlib.import_module(_recorder).set_up()
