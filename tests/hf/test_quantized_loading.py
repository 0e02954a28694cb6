"""Quantized models that `from_pretrained` loads at stage 3: no rank ever holds all of one, and
scripts see no difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hf.trainer_runs import SCRIPTS
from tests.processes import fork_ranks

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")
pytest.importorskip("transformers.distributed.expert_parallel")


def test_a_model_is_loaded_in_shards_as_it_is_whole(tmp_path: Path) -> None:
    done = fork_ranks(SCRIPTS / "quantized.py", tmp_path, nproc=2, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
