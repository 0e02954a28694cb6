"""Adam and AdamW on host memory in one pass: 16-bit gradient in, fp32 state updated in place, 16-bit parameter out.

The arithmetic is that of torch's default implementation (`torch.optim.adam._single_tensor_adam`), operation by
operation, in fp32; scalars are computed in Python and rounded to fp32, as torch does:

    grad = grad * factor
    master = master * (1 - lr * weight_decay)         decoupled (AdamW, arXiv 1711.05101), or
    grad = fma(master, weight_decay, grad)            coupled (Adam with an L2 term, arXiv 1412.6980)
    exp_avg = fma(1 - beta1, grad - exp_avg, exp_avg)
    exp_avg_sq = fma((1 - beta2) * grad, grad, exp_avg_sq * beta2)
    denominator = sqrt(exp_avg_sq) / sqrt(1 - beta2 ** step) + eps
    master = master + (-lr / (1 - beta1 ** step) * exp_avg) / denominator

The compiled kernel gives the bits of torch's default path with one exception: its square root is the exactly rounded
one, as a GPU's, while torch on x86 CPUs takes MKL's, which is one unit in the last place off in a fifth of all values.
After a step from equal state and an equal fp32 gradient the moments are equal bit by bit, the master up to an error of
2**-21 of the update. With `torch_sqrt` the kernel takes MKL's roots too, in half as much time again, and everything is
equal. An element's bits depend on nothing but its own numbers, wherever pieces or threads begin.

The kernel needs a C++ compiler and ninja, on first use only; without them torch's fused kernel does the same, chunk by
chunk, with other last bits of `exp_avg_sq`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim.adam import adam as torch_adam
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zero.optim.torch_optimizers import DeepSpeedCPUAdam, FusedAdam

logger = logging.getLogger("zero")

SOURCE = Path(__file__).with_suffix(".cpp")
# No contraction: the source says where to fuse. The others let the compiler vectorise sqrt and selections.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
# Elements that a thread takes at a time, 7 MB of memory: a thread on a disturbed core takes fewer of them. Tensors of
# up to this size are updated by the calling thread.
PIECE = 1 << 18
# Elements of the fallback's chunks: what one operation writes is in the L3 cache when the next one reads it. A call of
# torch's costs 0.1 ms, so that smaller ones are slower (benchmarks/LOG.md).
CHUNK = 1 << 19
# The fallback's vector loops end in scalar ones that round differently; no tail shorter than this reaches them.
ALIGNMENT = 64

# Names of dtypes and of kinds of decay in cpu_adam.cpp.
_DTYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_NONE, _COUPLED, _DECOUPLED = range(3)


class _Scalars(ctypes.Structure):
    """As `Scalars` in cpu_adam.cpp; ctypes rounds a Python float to fp32, to nearest."""

    _fields_ = [
        (name, ctypes.c_float)
        for name in ("factor", "decay", "to_gradient", "beta2", "from_square", "correction", "eps", "step_size")
    ] + [("roots", ctypes.c_void_p)]


@dataclass(frozen=True)
class _Settings:
    """The numbers of one step; see `adam`."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    factor: float
    torch_sqrt: bool = False

    def decay(self) -> int:
        """The kind of decay, as cpu_adam.cpp names it."""
        if self.weight_decay == 0:
            return _NONE
        return _DECOUPLED if self.decoupled else _COUPLED

    def scalars(self) -> _Scalars:
        return _Scalars(
            factor=self.factor,
            decay=1 - self.lr * self.weight_decay if self.decoupled else self.weight_decay,
            to_gradient=1 - self.beta1,
            beta2=self.beta2,
            from_square=1 - self.beta2,
            correction=(1 - self.beta2**self.step) ** 0.5,
            eps=self.eps,
            step_size=-(self.lr / (1 - self.beta1**self.step)),
            roots=_roots() if self.torch_sqrt else None,
        )


@torch.no_grad()
def adam(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out: torch.Tensor | None,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    factor: float,
    torch_sqrt: bool = False,
) -> None:
    """One step, the `step`-th one (from 1 on), on 1-D contiguous host tensors of one length; from any thread.

    `master`, `exp_avg` and `exp_avg_sq` (fp32) are updated in place; `grad` (fp32, bf16 or fp16), which stays as it is,
    is multiplied by `factor` in fp32 first; `out` (bf16 or fp16, or None) becomes the master, rounded to nearest.
    `weight_decay` is AdamW's if `decoupled`, else an L2 term. `torch_sqrt`: with torch's square roots; see above.
    Raises ValueError for tensors that are otherwise.
    """
    _check(master, grad, exp_avg, exp_avg_sq, out)
    settings = _Settings(step, lr, beta1, beta2, eps, weight_decay, decoupled, factor, torch_sqrt)
    kernel = _kernel()
    if kernel is None:
        _by_torch(master, grad, exp_avg, exp_avg_sq, out, settings)
    else:
        _by_kernel(kernel, master, grad, exp_avg, exp_avg_sq, out, settings)


def _check(
    master: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, out: torch.Tensor | None
) -> None:
    fp32, fp16 = (torch.float32,), (torch.bfloat16, torch.float16)
    for name, tensor, dtypes in (
        ("master", master, fp32),
        ("grad", grad, fp32 + fp16),
        ("exp_avg", exp_avg, fp32),
        ("exp_avg_sq", exp_avg_sq, fp32),
        ("out", out, fp16),
    ):
        if tensor is None and name == "out":
            continue
        if tensor.dtype not in dtypes or tensor.device.type != "cpu" or tensor.shape != (master.numel(),):
            raise ValueError(
                f"{name} must be a host tensor of shape ({master.numel()},) and dtype "
                f"{' or '.join(str(dtype) for dtype in dtypes)}, not of shape {tuple(tensor.shape)}, {tensor.dtype}, "
                f"on {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")


def serves(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `adam` can stand for `optimizer.step()`: plain Adam or AdamW, and nobody listens to its steps.

    The class must be torch's or this project's, since another one may do more; `step` must be the class's, at most
    counted by a learning-rate scheduler. Whoever calls `adam` in its place sets `optimizer._opt_called = True` for that
    scheduler, which otherwise warns.
    """
    kinds = (torch.optim.Adam, torch.optim.AdamW, FusedAdam, DeepSpeedCPUAdam)
    if type(optimizer) not in kinds or not _has_plain_step(optimizer):
        return False
    return all(_is_plain(group) for group in optimizer.param_groups)


def _has_plain_step(optimizer: torch.optim.Optimizer) -> bool:
    """No hook, and no `step` of the instance's own but the one by which LRScheduler counts calls."""
    hooks = (
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )
    if any(hooks):
        return False
    own = vars(optimizer).get("step")
    counts = getattr(own, "_wrapped_by_lr_sched", False) and own.__wrapped__ is type(optimizer).step
    return own is None or counts


def _is_plain(group: dict) -> bool:
    """No variant of Adam, and all numbers Python's: a tensor may change under the step, or be on a GPU."""
    variant = any(group.get(name) for name in ("amsgrad", "maximize", "capturable", "differentiable"))
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    return not variant and all(isinstance(number, (int, float)) for number in numbers)


# -- by the compiled kernel


def _by_kernel(
    kernel: Callable[..., None],
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out: torch.Tensor | None,
    settings: _Settings,
) -> None:
    numel, tensors = master.numel(), (master, grad, exp_avg, exp_avg_sq, out)
    places = [(0, 0) if tensor is None else (tensor.data_ptr(), tensor.element_size()) for tensor in tensors]
    dtypes = _DTYPES[grad.dtype], _DTYPES[None if out is None else out.dtype]
    decay, scalars = settings.decay(), ctypes.byref(settings.scalars())
    starts = iter(range(0, numel, PIECE))

    def work() -> None:
        for start in starts:  # shared by the threads: each takes the next piece
            pointers = [address + start * size for address, size in places]
            kernel(*pointers, min(PIECE, numel - start), *dtypes, decay, scalars)

    threads = thread_count()
    others = [_helpers(threads - 1).submit(work) for _ in range(min(threads, -(-numel // PIECE)) - 1)]
    work()
    for other in others:
        if not other.cancel():
            other.result()


@functools.cache
def _roots() -> ctypes.c_void_p | None:
    """Where MKL's square root is in torch's library; None where it is not, or where torch does not use it."""
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).VMSSQRT_
    except (OSError, AttributeError):
        return None
    # With every dtype and device named: scripts change the defaults.
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    found, count, mode = torch.empty_like(values), ctypes.c_int32(1000), ctypes.c_int64(0x2 | 0x140000 | 0x100)
    function(ctypes.byref(count), *(ctypes.c_void_p(t.data_ptr()) for t in (values, found)), ctypes.byref(mode))
    return ctypes.cast(function, ctypes.c_void_p) if torch.equal(found, values.sqrt()) else None


def thread_count() -> int:
    """The threads that one step may use: this rank's part of the cores that the process may run on, at least 1.

    `OMP_NUM_THREADS` goes before that, up to the number of those cores, except for the 1 that torchrun sets for every
    rank where there are several: it keeps torch's operations from crowding each other, and is nobody's choice.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > (1 if ranks > 1 else 0):
        return min(int(asked), cores)
    return max(1, cores // ranks)


@functools.cache
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="zero-cpu-adam")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.cache_clear)  # threads do not survive a fork


# -- building it


_building = threading.Lock()


def is_compiled() -> bool:
    """Whether the kernel is there; builds it if need be."""
    return _kernel() is not None


def new_state(master: torch.Tensor) -> dict[str, torch.Tensor]:
    """What torch's Adam keeps for a parameter before its first step."""
    return {
        "step": torch.tensor(0.0, dtype=torch.float32, device="cpu"),
        "exp_avg": torch.zeros_like(master),
        "exp_avg_sq": torch.zeros_like(master),
    }


def _kernel() -> Callable[..., None] | None:
    """The compiled function, built by the first call in a process, or None where that cannot be done."""
    with _building:
        return _kernel_once()


@functools.cache
def _kernel_once() -> Callable[..., None] | None:
    compiler = os.environ.get("CXX", "c++").split()[0]  # as torch's loader
    if missing := [name for name, found in ((compiler, shutil.which(compiler)), ("ninja", _ninja())) if not found]:
        _tell(logging.INFO, f"found no {' and no '.join(missing)}")
        return None
    try:
        kernel = _build()
        _self_check(kernel)
    except Exception as error:  # whatever a compiler, a file system or a loader may come up with
        _tell(logging.WARNING, (str(error) or repr(error)).splitlines()[0])
        return None
    return kernel


def _tell(level: int, reason: str) -> None:
    """One line of the first rank of each machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logger.log(level, "Adam on host memory falls back on torch's fused kernel, which is slower: %s", reason)


def _ninja() -> str | None:
    """ninja's folder: in the PATH, or beside an interpreter that was started by its own path."""
    found = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    return found and str(Path(found).parent)


def _build() -> Callable[..., None]:
    """Build and load by torch's loader, which keeps the library for the next process."""
    from torch.utils import cpp_extension  # slow to import, and needs setuptools

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    folder = Path(root) / _name()
    with _one_at_a_time(folder), _in_path(_ninja()):
        library = cpp_extension.load(
            _name(), [str(SOURCE)], extra_cflags=list(FLAGS), build_directory=str(folder), is_python_module=False
        )
    kernel = ctypes.CDLL(library).zero_cpu_adam
    kernel.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] + [ctypes.c_int] * 3 + [ctypes.POINTER(_Scalars)]
    kernel.restype = None
    return kernel


def _name() -> str:
    """The extension's name, by which libraries for other CPUs, environments and versions of the source are told apart.

    The loader does not look at the CPU, and a home folder may be shared by machines that differ.
    """
    parts = [str(SOURCE), SOURCE.read_text(), *FLAGS, torch.__version__, torch.__path__[0], platform.machine(), _cpu()]
    return f"zero_cpu_adam_{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}"


def _cpu() -> str:
    """What `-march=native` looks at: the first CPU's model and instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    kept = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in text.split("\n\n")[0].splitlines() if line.split("\t")[0] in kept)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Ranks build in turn: the first compiles, the others find it done.

    The loader's own lock is a file that outlives a killed process, whereafter every later one would wait forever. The
    system's lock does not; whoever holds it knows that a file there is such a leftover.
    """
    import fcntl  # not on Windows, where building ends here

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "turn", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield


@contextlib.contextmanager
def _in_path(folder: str) -> Iterator[None]:
    """`folder` at the end of PATH: the loader starts ninja by name."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = before + os.pathsep + folder
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _self_check(kernel: Callable[..., None]) -> None:
    """Raise RuntimeError if `kernel` and torch differ by more than two units in the last place of the result.

    All numbers are positive and of like size, so that no difference cancels, and there is a scalar tail.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    tensors = [torch.rand(1003, generator=generator, dtype=torch.float32, device="cpu") + 0.5 for _ in range(4)]
    settings = _Settings(3, 1e-2, 0.9, 0.99, 1e-8, 0.1, True, 0.5)
    ours, theirs = [[tensor.clone() for tensor in tensors] for _ in range(2)]
    out = torch.empty(1003, dtype=torch.bfloat16, device="cpu")
    _by_kernel(kernel, *ours, out, settings)
    _by_torch(*theirs, None, settings)
    furthest = max((a.view(torch.int32) - b.view(torch.int32)).abs().max() for a, b in zip(ours, theirs, strict=True))
    if furthest > 2 or not torch.equal(out, ours[0].bfloat16()):
        raise RuntimeError("its numbers are not torch's")


# -- by torch


def _by_torch(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out: torch.Tensor | None,
    settings: _Settings,
) -> None:
    """torch's fused kernel, in chunks, with torch's own threads."""
    numel = master.numel()
    body = numel - numel % ALIGNMENT
    buffer = torch.empty(min(CHUNK, max(body, ALIGNMENT)), dtype=torch.float32, device="cpu")
    for start in range(0, body, CHUNK):
        end = min(start + CHUNK, body)
        _fused(*(tensor[start:end] for tensor in (master, grad, exp_avg, exp_avg_sq)), buffer, settings)
        if out is not None:
            out[start:end].copy_(master[start:end])
    if body == numel:
        return
    tails = [tensor[body:] for tensor in (master, grad, exp_avg, exp_avg_sq)]
    padded = [torch.nn.functional.pad(tail, (0, ALIGNMENT - tail.numel())) for tail in tails]
    _fused(*padded, buffer, settings)
    for index in (0, 2, 3):
        tails[index].copy_(padded[index][: numel - body])
    if out is not None:
        out[body:].copy_(master[body:])


def _fused(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    buffer: torch.Tensor,
    settings: _Settings,
) -> None:
    """One step of a chunk; `buffer`, fp32 and at least as long, takes the gradient where it must be cast or scaled."""
    if grad.dtype != torch.float32 or settings.factor != 1.0:
        grad = buffer[: grad.numel()].copy_(grad)
        if settings.factor != 1.0:
            grad.mul_(settings.factor)
    torch_adam(
        [master],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(settings.step - 1, dtype=torch.float32, device="cpu")],
        fused=True,
        amsgrad=False,
        maximize=False,
        decoupled_weight_decay=settings.decoupled,
        beta1=settings.beta1,
        beta2=settings.beta2,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
    )
