"""run_translation.py from the command line: own data without a model, and the loss. Its
demonstration is in test_first_run.py, its documented commands in test_documented_commands.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.demonstration.cldr import build_corpus
from tests.distill import models
from tests.hf.trainer_runs import SHIPPED_CONFIG
from tests.processes import REPOSITORY, fork_ranks
from translation.tokenizer import scored_pieces, t5_tokenizer, train_sentencepiece

STEPS, GLOBAL_BATCH = 3, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Save a tiny T5 and its tokenizer, and a file for each split."""
    folder = tmp_path_factory.mktemp("translation")
    corpus = build_corpus(train_pairs=400, held_out_pairs=20)
    # Otherwise a mean of means would pass for the mean over tokens.
    assert len({len(pair.target.split()) for pair in corpus.train[:GLOBAL_BATCH]}) > 1
    for name in ("train", "validation", "test"):
        pairs = [{"en": pair.source, "de": pair.target} for pair in getattr(corpus, name)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    pieces = train_sentencepiece([text for pair in corpus.train for text in pair], vocab_size=400)
    tokenizer = t5_tokenizer(scored_pieces(pieces))
    models.t5(32, 1, seed=0, vocabulary=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(folder: Path, output: Path, line: str, nproc: int) -> tuple[list[dict[str, Any]], str]:
    """Run the script on forked ranks. Return its log, and what it printed."""
    given = (
        f"--deepspeed {SHIPPED_CONFIG} --output_dir {output} --source_lang en --target_lang de "
        f"--do_train --train_file {folder}/train.jsonl --logging_steps 1 --report_to none {line}"
    )
    script = REPOSITORY / "run_translation.py"
    process = fork_ranks(script, *given.split(), nproc=nproc, timeout=240)
    assert process.returncode == 0, process.stderr
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return history, process.stdout


def test_own_data_without_a_model(folder, tmp_path):
    line = (
        f"--do_eval --validation_file {folder}/validation.jsonl --do_predict --test_file "
        f"{folder}/test.jsonl --max_steps 8 --learning_rate 1e-3 --num_beams 2 "
        "--max_target_length 12"
    )
    history, said = train(folder, tmp_path, line, nproc=2)
    assert said.count("no model was named: making a small T5") == 1
    assert history[-2]["loss"] < history[0]["loss"]
    assert "eval_bleu" in json.loads((tmp_path / "eval_results.json").read_text())


def steps(folder: Path, output: Path, world: int, batch: int, accumulation: int) -> list[Any]:
    """The losses and norms of steps of the same four sentences. The learning rate is 0, so that
    every step can be compared.
    """
    line = (
        f"--model_name_or_path {folder} --max_steps {STEPS} --per_device_train_batch_size {batch} "
        f"--gradient_accumulation_steps {accumulation} --train_sampling_strategy sequential "
        "--learning_rate 0 --save_strategy no"
    )
    history, _ = train(folder, output, line, world)
    return [entry[key] for entry in history[:STEPS] for key in ("loss", "grad_norm")]


def test_loss_is_the_mean_over_the_tokens_of_the_step(folder, tmp_path):
    """Of one batch it is: tests/unit/translation/test_translation_loss.py."""
    whole = steps(folder, tmp_path / "whole", 1, GLOBAL_BATCH, 1)
    for world, batch, accumulation in ((1, 1, 4), (2, 1, 2)):
        found = steps(folder, tmp_path / f"{world}", world, batch, accumulation)
        assert found == pytest.approx(whole, rel=1e-5)
