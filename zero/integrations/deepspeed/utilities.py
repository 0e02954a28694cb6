"""Small functions and constants that scripts import from DeepSpeed and that the engine does not
use.
"""

from __future__ import annotations

import logging
import random
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zero.comm import world
from zero.core.optimizer_shard import STATES
from zero.device import memory_in_use, peak_memory

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


class RepeatingLoader:
    """An iterator over `loader` that begins again at its end."""

    def __init__(self, loader: Iterable):
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given ranks; on all without ranks, or with a -1 among them."""
    if not ranks or -1 in ranks or world.get_rank() in ranks:
        logger.log(level, "[rank %d] %s", world.get_rank(), message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log, with `force`, how much device memory this process uses, and its peak so far."""
    if force and world.get_rank() == 0:
        device = world.compute_device()
        now, most = memory_in_use(device) / 2**30, peak_memory(device) / 2**30
        logger.info("%s: %.2f GiB in use on %s, %.2f GiB at most", message, now, device, most)


def set_random_seed(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict | Sequence[dict], max_group_size: int | None = None
) -> list[dict]:
    """The param groups as they are, in a list: zero has no parameters that are experts' alone."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


def checkpoint(function: Callable, *args: object) -> object:
    """Run `function(*args)` and keep nothing but `args` for backward, which runs it again."""
    return torch_checkpoint(function, *args, use_reentrant=False)


def configure(
    mpu_: object,
    deepspeed_config: object = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """For Lightning, which calls `deepspeed.checkpointing.configure`: there is nothing to do,
    because the engine reads the section `activation_checkpointing` itself.
    """


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], target_fp_dtype: Any = None, target_device: Any = None
) -> Callable[..., Any]:
    """Return the tensor constructor `fn` as it is.

    transformers replaces this name while a model is built, because DeepSpeed's `Init` changes the
    dtype of `torch.arange`. `zero.Init` wraps no constructor, so there is nothing to do."""
    return fn
