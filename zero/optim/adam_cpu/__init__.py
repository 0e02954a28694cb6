"""Adam and AdamW on host memory in one pass: 16-bit gradient in, fp32 state updated in place,
16-bit parameter out.

The arithmetic is that of torch's fused step on a CPU (`torch.optim.AdamW(fused=True)`, which
transformers' Trainer takes by default), operation by operation, in fp32; scalars are computed in
Python and rounded to fp32, as torch does:

    grad = grad * factor
    master = master * (1 - lr * weight_decay)         decoupled (AdamW, arXiv 1711.05101), or
    grad = fma(master, weight_decay, grad)            coupled (Adam with L2, arXiv 1412.6980)
    exp_avg = fma(1 - beta1, grad - exp_avg, exp_avg)
    exp_avg_sq = fma((1 - beta2) * grad, grad, exp_avg_sq * beta2)
    denominator = sqrt(exp_avg_sq) / sqrt(1 - beta2 ** step) + eps
    master = master + (-lr / (1 - beta1 ** step) * exp_avg) / denominator

An element's bits depend on its own numbers alone, not on where pieces or threads begin. They are
those of torch's fused step but for the last elements of a tensor, at most 15, which do not fill a
vector: torch computes them partly in float64, so last bits of `exp_avg_sq` and of the master
differ. `fma` rounds once if torch's kernels do. They do at all but their lowest level of x86
instructions; the build asks torch.

torch's unfused Adam computes the same, but on x86 CPUs it takes MKL's square root, which differs
in the last bit for a fifth of all values. So after a step from equal state and an equal fp32
gradient, the moments are equal bit by bit, and the master differs by at most 2**-21 of the update.

Moments may be coded in 8 bits (`zero.optim.adam8bit`). Then they are decoded before this
arithmetic, and encoded after it, in the same pass.

The kernel needs a C++ compiler, on first use only. Where `is_compiled` is false, torch's fused step
takes its place (`zero.optim.update`). Then a few last bits depend on where sub-groups end."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zero.optim import adam8bit
from zero.optim.adam_cpu import build

logger = logging.getLogger("zero")

# Elements that a thread takes at a time: 7 MB of memory. Smaller tensors need one thread.
PIECE = 1 << 18
# As in kernel.cpp.
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Scalars(ctypes.Structure):
    """As `Scalars` in kernel.cpp; ctypes rounds a Python float to fp32, to nearest."""

    _floats = "factor l2 shrink to_gradient beta2 from_square correction eps step_size"
    _fields_ = [(name, ctypes.c_float) for name in _floats.split()] + [("turn", ctypes.c_uint32)]


def adam(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out: torch.Tensor | None,
    group: Mapping[str, Any],
    step: int,
    factor: float,
) -> None:
    """One step, the `step`-th one (from 1 on), on 1-D contiguous host tensors of one length; from
    any thread. `group`: a param group of torch's Adam, whose numbers are Python's.

    `master`, `exp_avg` and `exp_avg_sq` (fp32; the moments may be coded) are updated in place;
    `grad` (fp32, bf16 or fp16), which stays as it is, is multiplied by `factor` in fp32 first;
    `out` (bf16 or fp16, or None) becomes the master, rounded to nearest. Raises ValueError for
    tensors that are otherwise, RuntimeError where the kernel is not compiled."""
    kernel, numel = _kernel(), master.numel()
    if kernel is None:
        raise RuntimeError("the kernel of Adam on host memory is not compiled")
    _check(numel, master=master, grad=grad, out=out)
    scale = scale_sq = None
    is_narrow = exp_avg.dtype == torch.uint8
    if is_narrow and adam8bit.is_coded(exp_avg, numel) and adam8bit.is_coded(exp_avg_sq, numel):
        exp_avg, scale = adam8bit.parts(exp_avg, numel)
        exp_avg_sq, scale_sq = adam8bit.parts(exp_avg_sq, numel)
    else:
        _check(numel, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
    decoupled = group["decoupled_weight_decay"]
    scalars = _Scalars(
        factor=factor,
        l2=0.0 if decoupled else decay,
        shrink=1 - lr * decay if decoupled else 1.0,
        to_gradient=1 - beta1,
        beta2=beta2,
        from_square=1 - beta2,
        correction=(1 - beta2**step) ** 0.5,
        eps=group["eps"],
        step_size=-(lr / (1 - beta1**step)),
        turn=adam8bit.turn(step) if is_narrow else 0,
    )
    kernel(
        *(tensor.data_ptr() for tensor in (master, grad, exp_avg, exp_avg_sq)),
        *(None if tensor is None else tensor.data_ptr() for tensor in (out, scale, scale_sq)),
        numel,
        _TYPES[grad.dtype],
        0 if out is None else _TYPES[out.dtype],
        ctypes.byref(scalars),
        PIECE,
        thread_count(),
    )


def _check(length: int, **tensors: torch.Tensor | None) -> None:
    dtypes = {"grad": [*_TYPES], "out": [torch.bfloat16, torch.float16]}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        allowed = dtypes.get(name, [torch.float32])
        if tensor.dtype not in allowed or tensor.device.type != "cpu" or tensor.shape != (length,):
            raise ValueError(
                f"{name} must be a host tensor of shape ({length},) and dtype "
                f"{' or '.join(map(str, allowed))}, not of "
                f"shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")


_served: set[type] = {torch.optim.Adam, torch.optim.AdamW}


def computes_as_torch_adam(kind: type) -> type:
    """Class decorator for a subclass of torch's Adam with the same `step`, which `adam` may
    replace.
    """
    _served.add(kind)
    return kind


def has_adams_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` is plain Adam or AdamW, which keeps two moments and no third tensor."""
    has_third = any(group.get("amsgrad") for group in optimizer.param_groups)
    return type(optimizer) in _served and not has_third


def serves(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `adam` may replace `optimizer.step()`: it is plain Adam or AdamW, and has no hooks on
    its steps.

    The class must be torch's or this project's, since another one may do more; `step` must be the
    class's, at most counted by a learning-rate scheduler. The caller of `adam` sets
    `optimizer._opt_called = True`; otherwise that scheduler warns."""
    if type(optimizer) not in _served:
        return False
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    if any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)):
        return False
    own = vars(optimizer).get("step")
    wrapped = getattr(own, "__wrapped__", None)
    counts = getattr(own, "_wrapped_by_lr_sched", False) and wrapped is type(optimizer).step
    return (own is None or counts) and all(_is_plain(group) for group in optimizer.param_groups)


def _is_plain(group: dict) -> bool:
    """No variant of Adam, and all numbers Python's: a tensor may change under the step, or be on a
    GPU.
    """
    variant = any(map(group.get, ("amsgrad", "maximize", "capturable", "differentiable")))
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    return not variant and all(isinstance(number, (int, float)) for number in numbers)


def new_state(master: torch.Tensor, coded: bool = False) -> dict[str, torch.Tensor]:
    """What torch's Adam keeps for a parameter before its first step.

    `coded`: with moments in 8 bits.
    """
    zeros = adam8bit.new if coded else torch.zeros_like
    step = torch.tensor(0.0, dtype=torch.float32, device="cpu")
    return {"step": step} | {key: zeros(master) for key in adam8bit.KEYS}


def thread_count() -> int:
    """The threads that one step may use: this rank's part of the cores that the process may run on,
    at least 1.

    `OMP_NUM_THREADS` takes precedence, up to the number of those cores. With several ranks on a
    machine a 1 is ignored: torchrun sets it by itself, to limit the threads of torch's operations.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > (1 if ranks > 1 else 0):
        return min(int(asked), cores)
    return max(1, cores // ranks)


def is_compiled() -> bool:
    """Whether the kernel is available; builds it if need be."""
    return _kernel() is not None


@functools.cache
def _kernel() -> Callable[..., None] | None:
    """The compiled function, built by the first call on a machine; None if it cannot be built."""
    try:
        kernel = build.load_library().zero_cpu_adam
    except (OSError, RuntimeError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        level, reason = logging.WARNING, getattr(error, "stderr", None) or str(error)
        if isinstance(error, FileNotFoundError):
            level, reason = logging.INFO, f"found no {error.filename}"
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one line of each machine
            logger.log(
                level,
                "Adam on host memory falls back on torch's fused kernel, which is slower: %s",
                (reason.splitlines() or [repr(error)])[0],
            )
        return None
    address, long, short = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    kernel.argtypes = [address] * 7 + [long, short, short, address, long, short]
    kernel.restype = None
    return kernel
