"""Scripts that compare what they do with plain torch, or with one process: each on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.compatibility.data import write_datasets, write_models
from tests.hf.trainer_runs import SCRIPTS
from tests.processes import fork_ranks

RUN = ("-m", "zero", "run")
# By the calls that their loops make: most are not installed. TRL's scripts, which are all that
# alignment-handbook runs, are in `test_trl.py`.
STAGES = {
    "OpenRLHF": (2, 3),
    "open-instruct": (2, 3),
    "ms-swift": (3,),
    "LLaMA-Factory": (3,),
    "sentence-transformers": (3,),
    "accelerate": (3,),
    "diffusers": (2, 3),
    "Lightning Fabric": (2, 3),
}


def on_two_ranks(*words: object) -> None:
    done = fork_ranks(*map(str, words), nproc=2, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_beyond_one_training(tmp_path: Path) -> None:
    on_two_ranks(*RUN, SCRIPTS / "workflows.py", tmp_path)


@pytest.mark.parametrize(
    ("framework", "stage"), [(name, stage) for name in STAGES for stage in STAGES[name]]
)
def test_a_loop_trains_as_plain_torch(framework: str, stage: int, tmp_path: Path) -> None:
    """The losses, and the weights that are saved, by name and value."""
    on_two_ranks(*RUN, SCRIPTS / "frameworks.py", framework, stage, tmp_path)


def test_quantized_models_are_loaded_in_shards_as_they_are_whole(tmp_path: Path) -> None:
    """No rank ever holds all of one, and scripts see no difference."""
    for name in ("bitsandbytes", "torchao", "transformers.distributed.expert_parallel"):
        pytest.importorskip(name)
    on_two_ranks(SCRIPTS / "quantized.py", tmp_path)


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
def test_trls_generator_gets_merged_weights_block_by_block(
    trainer: str, mode: str, adapter: str, tmp_path: Path
) -> None:
    """With the bits of a merge in one process. Each parameter is gathered once, also in the first
    synchronization with a server, which asks for names and shapes before.
    """
    pytest.importorskip("trl")
    write_datasets(tmp_path)
    write_models(tmp_path)
    on_two_ranks(*RUN, SCRIPTS / "weight_sync.py", tmp_path, trainer, mode, adapter)
