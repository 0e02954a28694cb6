"""run_translation.py from the command line: the demonstration, the documented arguments and the
loss.
"""

import json

import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, T5Config
from transformers.models.t5 import T5ForConditionalGeneration

from examples.demonstration.cldr import build_corpus
from tests.processes import REPOSITORY, fork_ranks
from translation.tokenizer import scored_pieces, t5_tokenizer, train_sentencepiece

SCRIPT = REPOSITORY / "run_translation.py"
CONFIG = REPOSITORY / "configs" / "ds_config_zero3.json"
LIMIT = 240  # seconds


@pytest.fixture(scope="module")
def corpus():
    return build_corpus(train_pairs=400, held_out_pairs=20)


@pytest.fixture(scope="module")
def model_folder(corpus, tmp_path_factory):
    """Save a tiny T5 and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    pieces = train_sentencepiece([text for pair in corpus.train for text in pair], vocab_size=400)
    tokenizer = t5_tokenizer(scored_pieces(pieces))
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=1,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data_files(corpus, tmp_path_factory):
    """Write the three splits in three formats: nested JSON lines, flat JSON lines, TSV."""
    folder = tmp_path_factory.mktemp("data")
    files = {
        "train": folder / "train.jsonl",
        "validation": folder / "validation.json",
        "test": folder / "test.tsv",
    }
    nested = [{"translation": {"en": pair.source, "de": pair.target}} for pair in corpus.train]
    flat = [{"en": pair.source, "de": pair.target} for pair in corpus.validation]
    files["train"].write_text("".join(json.dumps(record) + "\n" for record in nested))
    files["validation"].write_text("".join(json.dumps(record) + "\n" for record in flat))
    files["test"].write_text(
        "en\tde\n" + "".join(f"{pair.source}\t{pair.target}\n" for pair in corpus.test)
    )
    return files


def script(*arguments, nproc, timeout=LIMIT):
    """Run the script on forked ranks, or in one process without a launcher (`nproc=0`)."""
    return fork_ranks(SCRIPT, *map(str, arguments), nproc=nproc, timeout=timeout)


def language_arguments(files, *splits):
    named = [item for split in splits for item in (f"--{split}_file", files[split])]
    return ["--source_lang", "en", "--target_lang", "de", *named]


def test_demonstration(tmp_path):
    output = tmp_path / "out"
    command = [
        "--deepspeed", CONFIG, "--output_dir", output, "--max_steps", "3", "--max_train_samples",
        "300",
        "--max_eval_samples", "9", "--max_predict_samples", "13",
    ]  # fmt: skip
    process = script(*command, nproc=2)
    assert process.returncode == 0, process.stderr
    assert "predict_chrf" in json.loads((output / "predict_results.json").read_text())
    assert "eval_loss" in json.loads((output / "eval_results.json").read_text())
    # 13 sentences on two ranks: one is repeated, and that one is neither scored nor written.
    assert (output / "generated_predictions.txt").read_text().count("\n") == 13
    assert process.stdout.count("prediction  ") == 12
    assert process.stdout.rindex(f"reloaded from {output}") > process.stdout.rindex("prediction  ")
    with safe_open(output / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}


def test_documented_command_line(model_folder, tmp_path):
    output = tmp_path / "output_dir"
    output.mkdir()
    (output / "old.txt").write_text("from an earlier run")
    process = script(
        "--deepspeed", CONFIG, "--model_name_or_path", model_folder,
        "--per_device_train_batch_size", 1,
        "--output_dir", output, "--overwrite_output_dir", "--fp16", "--do_train",
        "--max_train_samples", 5,
        "--num_train_epochs", 1, nproc=1,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    state = json.loads((output / "trainer_state.json").read_text())
    assert state["global_step"] == 5
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    assert model.dtype == torch.float16
    assert len(AutoTokenizer.from_pretrained(output)) == model.config.vocab_size


def test_own_data_without_a_model(data_files, tmp_path):
    output = tmp_path / "out"
    process = script(
        "--deepspeed", CONFIG, "--do_train", "--do_eval", "--do_predict", "--output_dir", output,
        *language_arguments(data_files, "train", "validation", "test"), "--max_steps", 8,
        "--learning_rate", "1e-3",
        "--logging_steps", 1, "--num_beams", 2, "--max_target_length", 12, "--report_to", "none",
        nproc=2,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("no model was named: making a small T5") == 1
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    assert history[-2]["loss"] < history[0]["loss"]
    assert "eval_bleu" in json.loads((output / "eval_results.json").read_text())


STEPS = 3
GLOBAL_BATCH = 4
# World size, batch per rank and accumulation: a step always has the same four sentences. The
# learning rate is 0, so the weights never change, and every step can be compared with plain torch.
CUTS = [(1, 1, 4), (2, 1, 2)]


def plain_losses(model_folder, corpus):
    """Return in plain torch the mean loss over the target tokens of each global batch, and its
    gradient norm.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(model_folder)
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)
    losses, norms = [], []
    for step in range(STEPS):
        pairs = corpus.train[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        rows = [
            dict(tokenizer(pair.source), labels=tokenizer(pair.target).input_ids) for pair in pairs
        ]
        # Otherwise a mean of means would pass for the mean over tokens.
        assert len({len(row["labels"]) for row in rows}) > 1
        batch = collate(rows)
        labels = batch.pop("labels")
        model.zero_grad()
        loss = cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        losses.append(loss.item())
        norms.append(
            torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]).item()
        )
    return losses, norms


@pytest.mark.parametrize(("world", "batch", "accumulation"), CUTS)
def test_loss_is_the_mean_over_the_tokens_of_the_step(
    world, batch, accumulation, model_folder, data_files, corpus, tmp_path
):
    output = tmp_path / "out"
    process = script(
        "--deepspeed", CONFIG, "--model_name_or_path", model_folder, "--do_train", "--output_dir",
        output,
        *language_arguments(data_files, "train"), "--max_steps", STEPS,
        "--per_device_train_batch_size", batch,
        "--gradient_accumulation_steps", accumulation, "--train_sampling_strategy", "sequential",
        "--learning_rate", 0, "--logging_steps", 1, "--save_strategy", "no", "--report_to", "none",
        nproc=world,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    history = json.loads((output / "trainer_state.json").read_text())["log_history"][:STEPS]
    losses, norms = plain_losses(model_folder, corpus)
    assert [entry["loss"] for entry in history] == pytest.approx(losses, rel=1e-5)
    assert [entry["grad_norm"] for entry in history] == pytest.approx(norms, rel=1e-4)
