"""The few names of the facade that have no home in the engine."""

from __future__ import annotations

import logging
import math
import os
import resource
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import nn

from zero import comm
from zero.checkpoint import get_fp32_state_dict_from_zero_checkpoint
from zero.checkpoint.folder import MODEL_FILE
from zero.deepspeed.accelerator import get_accelerator
from zero.export import copied_state_dict
from zero.gathered import GatheredParameters

if TYPE_CHECKING:
    from zero.engine import ZeroEngine

# The logger whose level transformers sets from `--log_level` when a training starts.
logger = logging.getLogger("zero")

# A file of this name in the home or working directory holds variables that `accelerate launch` passes to each node.
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"


def init_distributed(dist_backend: str | None = None, **kwargs: Any) -> None:
    """`zero.comm.init_distributed`, which accelerate calls in the middle of making its state."""
    comm.init_distributed(dist_backend, **kwargs)
    _tell_accelerate_the_backend()


def is_initialized() -> bool:
    """`zero.comm.is_initialized`; if so, accelerate goes on without a call of `init_distributed`."""
    initialized = comm.is_initialized()
    if initialized:
        _tell_accelerate_the_backend()
    return initialized


def _tell_accelerate_the_backend() -> None:
    """Complete the state which accelerate is making where it found no backend for its device.

    That is so on a machine without an accelerator, and accelerate would then take each rank for a world of one,
    whatever the size of the group that is there.
    """
    accelerate_state = sys.modules.get("accelerate.state")
    if accelerate_state is None or not accelerate_state.PartialState._shared_state:
        return
    state = accelerate_state.PartialState()
    if state.backend is None:
        state.backend = comm.get_backend()


def get_local_rank() -> int:
    """This process's rank on its host, as the launcher numbers it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


# Tensors below this many bytes are never offloaded to files.
MIN_SWAPPABLE_BYTES = 1024**2


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """Whether torch's version lies between two, inclusive; each may be left out."""
    installed = torch.__version__  # compares as a version, not as a string
    return (min_version is None or installed >= str(min_version)) and (
        max_version is None or installed <= str(max_version)
    )


def register_grad_hook(param: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> object:
    """Call `hook(param)` whenever `param.grad` has got a gradient; returns a handle with `remove()`."""
    return param.register_post_accumulate_grad_hook(hook)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `message` with this process's memory, if `force`d, from rank 0."""
    if force and comm.get_rank() == 0:
        device = get_accelerator().memory_allocated() / 2**30
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        logger.info("%s: %.2f GiB on the device, %.2f GiB of host memory at most", message, device, host)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given ranks; on all without, or with a -1 among them."""
    if not ranks or -1 in ranks or comm.get_rank() in ranks:
        logger.log(level, "[rank %d] %s", comm.get_rank(), message)


# The key in a checkpoint's `client_state` under which scripts describe it for DeepSpeed's universal checkpoints. It is
# stored like all other keys; every checkpoint here loads on any number of ranks without it.
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"


def get_model_ckpt_name_for_rank(base_folder: str | os.PathLike, mp_rank_str: str) -> str:
    """The file that stands for the model in a checkpoint's folder; the values themselves are in slices."""
    return os.path.join(base_folder, MODEL_FILE.replace("00", mp_rank_str))


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike,
    output_dir: str | os.PathLike,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a checkpoint's whole model in fp32 to `output_dir`, in files of at most `max_shard_size` with an index.

    `model.safetensors` with `safe_serialization`, else `pytorch_model.bin`. Tied weights are stored once. The model
    is held in host memory; `python -m zero consolidate` needs less. Raises ValueError for a missing or damaged
    checkpoint.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    size = sys.maxsize if max_shard_size is None else max_shard_size
    os.makedirs(output_dir, exist_ok=True)
    save_torch_state_dict(state, output_dir, max_shard_size=size, safe_serialization=safe_serialization)


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
    """The param groups as a list: experts are parameters like all others here, sharded over all ranks."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


@contextmanager
def unwrap_model_for_generation(model: ZeroEngine) -> Iterator[ZeroEngine]:
    """Context in which all parameters are gathered, once, and no hook runs: for `generate` with a model that fits."""
    with GatheredParameters(model.parameters()):
        hooks = model.optimizer.parameter_offload
        hooks.remove()
        try:
            yield model
        finally:
            hooks._register_deepspeed_module(hooks.module)


class AsyncIOBuilder:
    """Named by scripts that ask `deepspeed.ops.__compatible_ops__` what can be built; nothing is ever built here."""

    NAME = "async_io"


class CPUAdamBuilder(AsyncIOBuilder):
    NAME = "cpu_adam"


class CPUAdagradBuilder(AsyncIOBuilder):
    NAME = "cpu_adagrad"


class CPULionBuilder(AsyncIOBuilder):
    NAME = "cpu_lion"


class FusedAdamBuilder(AsyncIOBuilder):
    NAME = "fused_adam"


class NotImplementedBuilder(AsyncIOBuilder):
    """Of every operation that is not here."""

    NAME = "deepspeed_not_implemented"


# What the names above stand for is there without a build (True), or not at all (False).
COMPATIBLE_OPS = dict.fromkeys(("cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam"), True)
COMPATIBLE_OPS |= dict.fromkeys(("async_io", "deepspeed_not_implemented"), False)

# Of the build, without touching a device; "0.0": there is none, or it is to be asked for at run time.
TORCH_INFO = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": torch.version.cuda is not None,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": "0.0",
}


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Give a script's parser `--deepspeed`, a switch, and `--deepspeed_config FILE`, for `initialize(args=...)`."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="for scripts that ask whether to use it")
    group.add_argument("--deepspeed_config", default=None, type=str, help="the configuration, a JSON file")
    return parser


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return the tensor constructor `fn` as it is.

    transformers replaces this name while a model is built, to keep DeepSpeed's `Init` from changing the dtype of
    `torch.arange`. `zero.Init` wraps no constructor, so there is nothing to keep it from.
    """
    return fn


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy every tensor in nested mappings, lists and tuples to `device`; other values are passed on as they are.

    `torch.save` writes the whole storage behind a view; a copy has a storage of its own size. A state dict is copied as
    `zero.export.copied_state_dict` says.
    """
    if isinstance(item, Mapping) and item and all(isinstance(value, torch.Tensor) for value in item.values()):
        return copied_state_dict(item, comm.get_rank())
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, Mapping):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, Sequence) and not isinstance(item, str | bytes):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item
