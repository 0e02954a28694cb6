"""TRL's synchronization of weights with a generator at stage 3, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.compatibility.data import write_datasets, write_models
from tests.hf.trainer_runs import SCRIPTS
from tests.processes import fork_ranks

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weight_sync")
    write_datasets(path)
    write_models(path)
    return path


@pytest.mark.parametrize(
    ("trainer", "mode", "adapter"),
    [
        ("grpo", "server", "LoRA"),
        ("grpo", "server", "none"),
        ("grpo", "colocate", "DoRA"),
        ("rloo", "server", "IA3"),
        ("rloo", "colocate", "head"),
    ],
)
def test_a_generator_gets_merged_weights_block_by_block(
    folder: Path, trainer: str, mode: str, adapter: str
) -> None:
    """With the bits of a merge in one process. Each parameter is gathered once, also in the first
    synchronization with a server, which asks for names and shapes before.
    """
    process = fork_ranks(
        "-m", "zero", "run", SCRIPTS / "weight_sync.py", folder, trainer, mode, adapter,
        nproc=2, timeout=280,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
