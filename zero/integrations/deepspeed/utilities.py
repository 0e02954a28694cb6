"""Small functions and constants that scripts import from DeepSpeed and that the engine does not
use.
"""

from __future__ import annotations

import logging
from argparse import ArgumentParser
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zero.optim.placement import STATES

# The logger whose level transformers sets from `--log_level` when a training starts.
logger = logging.getLogger("zero")

# A file of this name in the home or working directory holds variables that `accelerate launch`
# passes to each node.
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"


# The values of `device` in the offload sections, and what `engine.offload_states` takes, as
# enumerations.
OffloadDeviceEnum = Enum(
    "OffloadDeviceEnum", {name: name for name in ("none", "cpu", "nvme")}, type=str
)
OffloadStateTypeEnum = Enum("OffloadStateTypeEnum", {name: name for name in STATES}, type=str)


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Give a script's parser `--deepspeed`, a switch, and `--deepspeed_config FILE`, for
    `initialize(args=...)`.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed", action="store_true", help="for scripts that ask whether to use it"
    )
    group.add_argument("--deepspeed_config", help="the configuration, a JSON file")
    return parser


def move_to_device(item: Any, device: torch.device | str) -> Any:
    """`item` with every tensor in nested lists, tuples and dicts moved to `device`."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), item)


def configure(*args: object, **settings: object) -> None:
    """For Lightning, which calls `deepspeed.checkpointing.configure`: there is nothing to do,
    because the engine reads the section `activation_checkpointing` itself.
    """


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """Return the tensor constructor `fn` as it is.

    transformers replaces this name while a model is built, because DeepSpeed's `Init` changes the
    dtype of `torch.arange`. `zero.Init` wraps no constructor, so there is nothing to do."""
    return fn
