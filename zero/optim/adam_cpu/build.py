"""Compiles the kernel of Adam on host memory when it is first used, and keeps it in a folder of the
user.

It takes a C++ compiler alone: no ninja, no headers of torch or Python, no CUDA toolkit."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

logger = logging.getLogger("zero")

SOURCE = Path(__file__).with_name("kernel.cpp")
# No contraction: the source says where to fuse. The others let the compiler vectorise sqrt and
# selections.
FLAGS = (
    "-std=c++17",
    "-pthread",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)


def load_library() -> ctypes.CDLL:
    """The compiled kernel, built unless it is in the cache.

    The first half of its name is a hash of all that it depends on: the command and the
    preprocessor's output, which is the source and, as macros, the compiler's version and the CPU's
    instructions. (Machines may share a home folder.) The second half is a hash of the library's
    content. torch's own loader does not look at the CPU, and its lock file outlives a killed
    process."""
    compiler = [
        *shlex.split(os.environ.get("CXX") or "c++"),
        *FLAGS,
        f"-DTORCH_FUSES={int(_torch_fuses())}",
        str(SOURCE),
    ]
    name = _hash(f"{compiler} {_output_of([*compiler, '-E', '-dD'])}".encode())
    folder = _cache()
    for library in folder.glob(f"{name}-*.so") if folder else ():
        # It may have come here while others could write to the folder.
        is_private = _is_private(library, stat.S_ISREG)
        if is_private and library.name == f"{name}-{_hash(library.read_bytes())}.so":
            return ctypes.CDLL(str(library))
    # A folder where no other user may write.
    with tempfile.TemporaryDirectory(dir=folder) as private:
        library = Path(private, "kernel.so")
        _output_of([*compiler, "-shared", "-fPIC", "-o", str(library)])
        loaded = ctypes.CDLL(str(library))
        if folder:
            library.chmod(0o700)  # whatever the umask allows
            # Whole or not at all.
            os.replace(library, folder / f"{name}-{_hash(library.read_bytes())}.so")
        return loaded


def _cache() -> Path | None:
    """The folder of compiled kernels, or None if other users may write to it, because their files
    would be run.
    """
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")
    folder = Path(extensions).expanduser() / "zero_cpu_adam"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None  # it is compiled for this process alone
    if _is_private(folder, stat.S_ISDIR):
        return folder
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(
            "%s is not used: it must be a folder of this user that nobody else can write to", folder
        )
    return None


def _is_private(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Whether `path` is of this kind itself, and nobody but its owner, who is this user, can write
    to it.
    """
    found = path.lstat()
    mode = found.st_mode
    return is_kind(mode) and found.st_uid == os.geteuid() and not mode & 0o022


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _torch_fuses() -> bool:
    """Whether torch's kernels fuse a product and a sum, rounding once: not at its lowest level of
    x86 instructions.
    """
    values = torch.tensor([1 + 2.0**-12, -1.0], dtype=torch.float32, device="cpu")
    return torch.addcmul(values[1], values[0], values[0]).item() != 2.0**-11


def _output_of(command: list[str]) -> str:
    run = subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
    return run.stdout
