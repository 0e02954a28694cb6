"""Small functions and constants that scripts import from DeepSpeed and that the engine does not
use.
"""

from __future__ import annotations

import logging
import math
import resource
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zero.comm import world
from zero.core.gathered_parameters import GatheredParameters
from zero.integrations.deepspeed.accelerator import get_accelerator
from zero.integrations.deepspeed.engine import DeepSpeedEngine

# The logger whose level transformers sets from `--log_level` when a training starts.
logger = logging.getLogger("zero")

# A file of this name in the home or working directory holds variables that `accelerate launch`
# passes to each node.
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"

# Tensors below this many bytes are never offloaded to files.
MIN_SWAPPABLE_BYTES = 1024**2

# About torch's build, without touching a device. "0.0": there is none, or it is known only at run
# time.
TORCH_INFO = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": torch.version.cuda is not None,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": "0.0",
}


def _builder(kind: str, name: str) -> type:
    """A class with a NAME to look up in `COMPATIBLE_OPS`; nothing is ever built here."""
    return type(kind, (), {"NAME": name})


AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io")
CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam")
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad")
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion")
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam")
NotImplementedBuilder = _builder("NotImplementedBuilder", "deepspeed_not_implemented")

# Whether an operation is there. None of them needs a build.
COMPATIBLE_OPS = dict.fromkeys(("cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam"), True)
COMPATIBLE_OPS |= dict.fromkeys(("async_io", "deepspeed_not_implemented"), False)


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Give a script's parser `--deepspeed`, a switch, and `--deepspeed_config FILE`, for
    `initialize(args=...)`.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed",
        default=False,
        action="store_true",
        help="for scripts that ask whether to use it",
    )
    group.add_argument(
        "--deepspeed_config", default=None, type=str, help="the configuration, a JSON file"
    )
    return parser


def required_torch_version(
    min_version: str | float | None = None, max_version: str | float | None = None
) -> bool:
    """Whether torch's version lies between two, inclusive; each may be left out."""
    installed = torch.__version__  # compares as a version, not as a string
    return (min_version is None or installed >= str(min_version)) and (
        max_version is None or installed <= str(max_version)
    )


def register_grad_hook(param: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> object:
    """Call `hook(param)` whenever `param.grad` has got a gradient; returns a handle with
    `remove()`.
    """
    return param.register_post_accumulate_grad_hook(hook)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given ranks.

    Without ranks, or with a -1 among them, all ranks log it.
    """
    if not ranks or -1 in ranks or world.get_rank() in ranks:
        logger.log(level, "[rank %d] %s", world.get_rank(), message)


def set_log_level_from_string(log_level: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of `custom_logger`, or of the engine's logger.

    ValueError for a word that is no level.
    """
    (custom_logger or logger).setLevel(log_level.upper())


_configured = False


def configure(*args: object, **settings: object) -> None:
    """For models that ask whether `deepspeed.checkpointing` was configured; the engine reads its
    own configuration.
    """
    global _configured
    _configured = True


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Undo `configure`."""
    global _configured
    _configured = False


def checkpoint(function: Callable, *args: object) -> object:
    """Run `function(*args)` and keep nothing but `args` for backward, which runs it again."""
    return torch_checkpoint(function, *args, use_reentrant=False)


class OnDevice:
    """Context in which new tensors are on `device`, and new floating-point tensors have `dtype`."""

    def __init__(
        self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True
    ):
        self.dtype = dtype
        self.device = torch.device(device)
        self.enabled = enabled

    def __enter__(self) -> None:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self.device.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.enabled:
            self.device.__exit__(*error)
            torch.set_default_dtype(self._before)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `message` with this process's memory, if `force`d, from rank 0."""
    if force and world.get_rank() == 0:
        device = get_accelerator().memory_allocated() / 2**30
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        logger.info(
            "%s: %.2f GiB on the device, %.2f GiB of host memory at most", message, device, host
        )


class RepeatingLoader:
    """An iterator over `loader` that begins anew at its end."""

    def __init__(self, loader: Iterable):
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> object:
        for batch in self._batches:
            return batch
        self._batches = iter(self.loader)
        return next(self._batches)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float = math.inf
) -> list[dict[str, Any]]:
    """The param groups as a list: experts are parameters like all others here, sharded over all
    ranks.
    """
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


@contextmanager
def unwrap_model_for_generation(model: DeepSpeedEngine) -> Iterator[DeepSpeedEngine]:
    """Context in which all parameters are gathered, once, and no hook runs: for `generate` with a
    model that fits.
    """
    with GatheredParameters(model.parameters()):
        model.hooks.remove()
        try:
            yield model
        finally:
            model.hooks.install()


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """Return the tensor constructor `fn` as it is.

    transformers replaces this name while a model is built, to keep DeepSpeed's `Init` from changing
    the dtype of `torch.arange`. `zero.Init` wraps no constructor, so this does nothing."""
    return fn
