"""Tokens in files that are mapped into memory: they are what lists of them were, are made once, and
are not in the memory of a process.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from datasets import Dataset, IterableDataset
from datasets.table import MemoryMappedTable

from distill import data
from distill.config import DistillationConfig
from distill.corpus import train_tokenizer
from distill.examples import (
    Encoding,
    encoding_of,
    make_examples,
    read_examples,
    stream_examples,
)
from distill.trainer import DistillationTrainer
from tests.distill import models
from tests.processes import run_on
from translation.records import InputError, Records, open_records

LINES = [f"def add_{i}(a, b): return a + b + {i}" for i in range(30)]
TEXTS = [*LINES, "", "gr\u00fc\u00df dich \u4e16\u754c \U0001f680", " ", "x"]
ALONE: Any = SimpleNamespace(process_index=0, local_process_index=0, world_size=1)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES, 290)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS), encoding="utf-8")
    return path


def make(path: Path, encoding: Encoding) -> Dataset:
    return make_examples(
        lambda: open_records(str(path), "--train_file"), encoding, ALONE, str(path.parent / "cache")
    )


def as_lists(encoding: Encoding) -> list[dict[str, list[int]]]:
    """What was made before, without files: lists of all tokens."""
    records = [{"text": text} for text in TEXTS]
    segments = [data.segments_of(record, "", encoding.tokenizer) for record in records]
    whole = [data.encode(each, encoding.tokenizer) for each in segments]
    if encoding.packs:
        return list(data.pack(whole, encoding.length, 0))
    return [data.cut(example, encoding.length) for example in whole]


@pytest.mark.parametrize("packs", [True, False])
def test_examples_from_files_are_those_of_lists(file, packs, tokenizer):
    encoding = Encoding(tokenizer, 16, packs)
    found = make(file, encoding)
    assert [dict(example) for example in found] == as_lists(encoding)
    assert isinstance(found, Dataset) and found.cache_files
    assert isinstance(found.data, MemoryMappedTable)
    assert found.features["input_ids"] == datasets.List(datasets.Value("int32"))


def test_examples_are_made_once_and_again_if_anything_changes(file, tokenizer, monkeypatch):
    encoding, read = Encoding(tokenizer, 16), []
    segments_of = data.segments_of

    def counted(record, *given):
        read.append(record)
        return segments_of(record, *given)

    monkeypatch.setattr(data, "segments_of", counted)
    make(file, encoding)
    assert len(read) == len(TEXTS)
    make(file, encoding)
    tokenizer("other texts in between", truncation=True, max_length=3)
    make(file, encoding)
    assert len(read) == len(TEXTS)
    make(file, replace(encoding, length=8))
    assert len(read) == 2 * len(TEXTS)
    file.write_text(json.dumps({"text": "another"}))
    assert len(make(file, encoding)) == 1


def test_no_more_is_read_than_the_first_tokens_need(tokenizer):
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield {"text": LINES[0]}

    records = Records("here", dataset=IterableDataset.from_generator(endless))
    whole = len(data.encode([data.Segment(LINES[0], True)], tokenizer)["input_ids"])
    found = list(read_examples(records, Encoding(tokenizer, 16, first_tokens=40)))
    assert len(found) == 3 and read <= 48 // whole + data.TEXTS_AT_A_TIME
    alone = list(read_examples(records, Encoding(tokenizer, 99, packs=False, first_examples=4)))
    assert len(alone) == 4


@pytest.mark.parametrize(
    "content, named",
    [
        ("", "--train_file .*: there is nothing in it"),
        ('{"text": " "}', "there is nothing in it"),
        ('{"words": "x"}', r"line 1: no text, messages .*; its keys are words \(str\); --text"),
        ('{"text": 5}', r"line 1: no text, messages .*; its keys are text \(int\)"),
        ('{"text": "fine"}\n{"text": ', "line 2: not valid JSON"),
    ],
)
def test_what_is_wrong_with_records_is_named(file, content, named, tokenizer):
    file.write_text(content)
    with pytest.raises(InputError, match=named):
        make(file, Encoding(tokenizer, 16))


def test_a_column_of_texts_is_read_whatever_else_a_record_has(file, tokenizer):
    records = [{"body": {"en": LINES[0]}, "text": "title"}, {"body": {"en": LINES[1]}}]
    file.write_text("\n".join(map(json.dumps, records)))
    found = list(make(file, Encoding(tokenizer, 99, packs=False, text_column="body.en")))
    whole = [data.encode([data.Segment(line, True)], tokenizer) for line in LINES[:2]]
    assert found == whole
    with pytest.raises(InputError, match="no column 'words' for --text_column; the columns are bo"):
        make(file, Encoding(tokenizer, 99, text_column="words"))


@pytest.mark.parametrize(
    ("pairs", "argument"),
    [(True, "text_column"), (False, "source_column"), (False, "source_prefix")],
)
def test_columns_of_the_other_kind_of_model_are_refused(pairs, argument, tokenizer, tmp_path):
    given: dict[str, Any] = {argument: "text"}
    args = DistillationConfig(str(tmp_path), use_cpu=True, report_to="none", **given)
    with pytest.raises(InputError, match=f"--{argument} is for .*: leave it out"):
        encoding_of(args, tokenizer, pairs)


def test_texts_are_tokenized_together_as_they_are_alone(tokenizer):
    """Some are learnt as a whole, of others only the answer is."""
    records = [{"text": text} if number % 3 else ["q", text] for number, text in enumerate(LINES)]
    segments = [data.segments_of(record, "", tokenizer) for record in records]
    assert len(segments) < data.TEXTS_AT_A_TIME
    together = list(data.encode_all(segments, tokenizer))
    assert together == [data.encode(each, tokenizer) for each in segments]


def test_a_cache_that_cannot_be_written_is_named(file, tokenizer):
    (file.parent / "cache").write_text("a file")
    with pytest.raises(InputError, match=r"--train_file .*--cache_dir names another folder"):
        make(file, Encoding(tokenizer, 16))


def made_by_ranks(rank: int, world_size: int, folder: str) -> tuple[int, str, str]:
    args: Any = SimpleNamespace(process_index=rank, local_process_index=rank, world_size=world_size)
    tokenizer = train_tokenizer(LINES, 290)
    path, errors = Path(folder, "data.jsonl"), []
    for fails in (False, True):

        def open_file(fails=fails):
            if fails and rank == 0:
                raise OSError("the disk of rank 0")
            return open_records(str(path), "--train_file")

        try:
            found = make_examples(open_file, Encoding(tokenizer, 16), args, folder + "/cache")
        except RuntimeError as error:
            errors.append(str(error))
        else:
            names = sorted(str(each) for each in Path(folder, "cache").rglob("*.arrow"))
            where = found.cache_files[0]["filename"]
    return len(names), where, errors[0]


def test_ranks_map_the_same_files_and_share_an_error(file):
    found = run_on(2, made_by_ranks, str(file.parent))
    assert found[0] == found[1]
    count, _, error = found[0]
    assert count == 1 and error == "rank 0: OSError: the disk of rank 0"


def config(tmp_path, **options) -> DistillationConfig:
    return DistillationConfig(
        output_dir=str(tmp_path / "out"), use_cpu=True, report_to="none", disable_tqdm=True,
        per_device_train_batch_size=4, logging_steps=1, save_strategy="no", max_length=16,
        kd_alpha=0.0, **options,
    )  # fmt: skip


def losses(trainer: DistillationTrainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("streams", [False, True])
def test_the_trainer_takes_records(streams, tmp_path, tokenizer):
    records: Any = Dataset.from_list([{"text": text} for text in TEXTS])
    lists, held_out = as_lists(Encoding(tokenizer, 16)), Dataset.from_list([{"text": LINES[0]}])
    if streams:
        records = records.to_iterable_dataset()
        assert [*stream_examples(Records("", dataset=records), Encoding(tokenizer, 16))] == lists
    trainer, expected = (
        DistillationTrainer(
            models.llama(16, 2, seed=1, vocabulary=len(tokenizer)), train_dataset=data,
            eval_dataset={"one": held_out}, args=config(tmp_path, max_steps=3),
            processing_class=tokenizer,
        )
        for data in (records, lists)
    )  # fmt: skip
    found = losses(trainer)
    assert all(loss > 0 for loss in found) and (streams or found == losses(expected))
    assert trainer.evaluate()["eval_one_loss"] > 0


def test_records_without_a_tokenizer_are_named(tmp_path):
    records = Dataset.from_list([{"text": "a"}])
    with pytest.raises(ValueError, match="train_dataset has the columns text and no input_ids"):
        DistillationTrainer(
            models.llama(16, 2, seed=1), args=config(tmp_path), train_dataset=records
        )
