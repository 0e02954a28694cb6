"""From files and saved datasets to tokens."""

import json
from types import SimpleNamespace

import datasets
import pytest

from examples.demonstration.cldr import build_corpus
from translation import data
from translation.arguments import parse_arguments
from translation.model import ScratchSize, _make_tokenizer
from translation.records import InputError
from translation.tokenizer import scored_pieces, t5_tokenizer, train_sentencepiece

PAIRS = [
    ("one cat", "eine Katze"),
    ("NA", "42"),
    ("two cats, three dogs", "zwei Katzen, drei Hunde"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer():
    return t5_tokenizer(
        scored_pieces(train_sentencepiece([text for pair in PAIRS for text in pair], vocab_size=60))
    )


def arguments_of(line):
    return f"{line} --do_train --output_dir out --source_lang en --target_lang de".split()


def load(line):
    model_args, data_args, args = parse_arguments(arguments_of(line))
    return data.load_splits(data_args, model_args, args, build_corpus)


def pairs(dataset):
    return list(zip(dataset["source"], dataset["target"], strict=True))


TABLES = {"table.csv": ",", "table.tsv": "\t", "excel.csv": ";"}


@pytest.mark.parametrize("kind", ["nested.jsonl", "flat.json", "array.json", *TABLES])
def test_every_format_gives_the_same_pairs(folder, kind):
    records = [{"en": en, "de": de} for en, de in PAIRS]
    if kind == "nested.jsonl":
        records = [{"translation": record, "id": 1} for record in records]
    text = "\n\n".join(json.dumps(record) for record in records)
    if kind == "array.json":
        text = json.dumps(records)
    if kind in TABLES:
        rows = (("de", "en"), *((f'"{de}"', f'"{en}"') for en, de in PAIRS))
        text = "\ufeff" * (kind == "excel.csv") + "\r\n".join(map(TABLES[kind].join, rows))
    (folder / kind).write_text(text + "\n", encoding="utf-8")
    splits = load(f"--train_file {kind}")
    assert list(splits) == ["train"]
    assert pairs(splits["train"]) == PAIRS
    assert pairs(load(f"--train_file {kind} --max_train_samples 2")["train"]) == PAIRS[:2]


def test_saved_datasets(folder):
    saved = datasets.Dataset.from_list([{"translation": {"en": en, "de": de}} for en, de in PAIRS])
    saved.save_to_disk("one")
    datasets.DatasetDict(train=saved, test=saved.select([2])).save_to_disk("several")
    assert pairs(load("--dataset_name one")["train"]) == PAIRS
    assert pairs(load("--dataset_name several --do_predict")["test"]) == PAIRS[2:]
    with pytest.raises(InputError, match="several has no split 'validation', only train, test"):
        load("--dataset_name several --do_eval")


def test_a_changed_file_is_read_again(folder):
    for en, de in PAIRS[:2]:
        (folder / "train.jsonl").write_text(json.dumps({"en": en, "de": de}))
        assert pairs(load("--train_file train.jsonl")["train"]) == [(en, de)]


def test_datasets_under_the_name_of_a_file(folder):
    saved = datasets.Dataset.from_list([{"en": en, "de": de} for en, de in PAIRS])
    saved.save_to_disk("saved")
    saved.to_parquet("table.parquet")
    for name in ("saved", "table.parquet"):
        assert pairs(load(f"--train_file {name}")["train"]) == PAIRS


@pytest.mark.parametrize("damage", ["state.json", "data-00000-of-00001.arrow", "dataset_info.json"])
def test_a_damaged_dataset_is_named(folder, damage):
    datasets.Dataset.from_dict({"en": ["one"], "de": ["eins"]}).save_to_disk("damaged")
    (folder / "damaged" / damage).write_bytes(b"[")
    with pytest.raises(InputError, match="^--dataset_name damaged: "):
        load("--dataset_name damaged")


def test_a_record_without_text(folder):
    datasets.Dataset.from_dict({"en": ["one", "two"], "de": ["eins", None]}).save_to_disk("hole")
    named = r"^--dataset_name hole, record 2: the text for --target_lang \('de'\) is None"
    with pytest.raises(InputError, match=named):
        load("--dataset_name hole")


@pytest.fixture
def tokens(folder, tokenizer):
    """Return a function from (command line, split) to (tokens of PAIRS, their collator)."""
    (folder / "train.jsonl").write_text(json.dumps({"en": "one", "de": "eins"}))
    text = datasets.Dataset.from_list([{"source": en, "target": de} for en, de in PAIRS])

    def tokenize(*line, split="train"):
        line = [*arguments_of("--train_file train.jsonl"), *line]
        _, data_args, args = parse_arguments(line)
        return data.tokenize(text, tokenizer, data_args, args, split)

    return tokenize


def test_texts_without_a_word(folder):
    (folder / "train.jsonl").write_text('{"en": "a", "de": ""}\n{"en": "b", "de": " "}\n')
    with pytest.raises(InputError, match="^--train_file train.jsonl: all texts of 'de' are empty"):
        load("--train_file train.jsonl")


def test_more_characters_than_pieces():
    letters = [chr(0x4E00 + number) for number in range(200)]
    text = datasets.Dataset.from_dict({"source": letters, "target": letters})
    size = ScratchSize(vocab_size=100, character_coverage=1.0, d_model=32, num_layers=1)
    with pytest.raises(InputError, match="vocabulary of 100 pieces cannot .*--tokenizer_name"):
        _make_tokenizer(text, size, SimpleNamespace(process_index=0))


def test_prefix_and_labels(tokens, tokenizer):
    first = tokens("--source_prefix", "three ")[0]
    assert first["input_ids"] == tokenizer("three one cat").input_ids
    assert first["labels"] == tokenizer("eine Katze").input_ids


def test_lengths_are_cut_at_the_end_of_sentence(tokens, tokenizer):
    limits = "--max_source_length 4 --max_target_length 3 --val_max_target_length 5"
    for split, length in [("train", 3), ("validation", 5)]:
        long = tokens(*limits.split(), split=split)[2]
        assert (len(long["input_ids"]), len(long["labels"])) == (4, length)
        assert long["input_ids"][-1] == long["labels"][-1] == tokenizer.eos_token_id


def test_padding_to_the_maximum(tokens, tokenizer):
    lengths = ["--max_source_length", "20", "--max_target_length", "20", "--pad_to_max_length"]
    padded = tokens(*lengths)[0]
    assert len(padded["input_ids"]) == len(padded["labels"]) == 20
    assert padded["labels"].count(-100) == 20 - len(tokenizer("eine Katze").input_ids)
    counted = tokens(*lengths, "--ignore_pad_token_for_loss", "False")[0]
    assert counted["labels"].count(tokenizer.pad_token_id) == padded["labels"].count(-100)
