"""The limit of address space under which the benchmark consolidates a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.checkpoint.consolidation import consolidate_within_limit

CHECKPOINT = Path(__file__).parents[2] / "dist" / "checkpoint" / "format_2" / "global_step2"

TAKEN = 64 << 20
# What `import torch` of a build for CUDA does to the address space. Then the command takes more
# than any allocator has left from the imports, in which a small checkpoint may fit.
LARGE_IMPORT = f"""
import mmap, sys
reserved = mmap.mmap(-1, 4 << 30, mmap.MAP_PRIVATE, prot=0)
taken = []

def take(event, arguments):
    if event == "open" and str(arguments[0]).endswith("checkpoint.json") and not taken:
        taken.append(bytearray({TAKEN}))

sys.addaudithook(take)
"""


def test_only_what_is_taken_beyond_the_imports_counts(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(LARGE_IMPORT)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    consolidate_within_limit(CHECKPOINT, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
    with pytest.raises(SystemExit, match="exit code 1: zero consolidate"):
        consolidate_within_limit(CHECKPOINT, tmp_path / "too large", limit=TAKEN // 2)
