"""Bad input ends with one line that names it and the remedy, before anything is loaded."""

import json

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import BartConfig, T5Config

from translation.arguments import check_output_dir, checkpoint_of, parse_arguments
from translation.records import InputError, open_records, read_pairs

LANGUAGES = {"source": "en", "target": "de"}
PAIR = '{"translation": {"en": "Germany", "de": "Deutschland"}}\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a working directory with a good training file, and files that are not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(PAIR)
    (tmp_path / "adamw.json").write_text(json.dumps({"optimizer": {"type": "AdamW"}}))
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    return tmp_path


DATA = "--output_dir out --train_file train.jsonl --source_lang en --target_lang de"
TRAIN = f"--do_train {DATA}"

BAD_ARGUMENTS = [
    (DATA, "--do_train"),
    ("--do_predict --test_file train.jsonl --output_dir out", "--model_name_or_path"),
    (TRAIN.replace("train.", "no."), "--train_file no.jsonl: no such file or folder"),
    (TRAIN.replace("--source_lang en", ""), "--source_lang is missing"),
    (TRAIN.replace("lang de", "lang en"), "both 'en'"),
    (TRAIN.replace("lang de", "lang fr"), "no column 'fr'.*--target_lang.*en, de"),
    (f"{TRAIN} --do_eval", "--do_eval needs data: give --validation_file"),
    (f"{TRAIN} --max_train_samples 0", "--max_train_samples is 0"),
    (f"{TRAIN} --model_name_or_path .", "--model_name_or_path .*no config.json"),
    (f"{TRAIN} --model_name_or_path ./t5", "--model_name_or_path ./t5: no such folder"),
    (f"{TRAIN} --model_name_or_path empty", r"no weights .*--config_name"),
    (f"{TRAIN} --deepspeed missing.json", "missing.json"),
    (f"{TRAIN} --resume_from_checkpoint out/checkpoint-5", "checkpoint-5: there is no trainer_sta"),
    (f"{TRAIN} --resume_from_checkpoint True", "there is no whole checkpoint in out"),
    (TRAIN.replace("out ", "train.jsonl/out "), "--output_dir.*cannot be created or written to"),
    (f"{TRAIN} --optim adafactor --deepspeed adamw.json", "adafactor: adamw.json.*AdamW.*delete"),
    ("--config broken.yaml", "--config broken.yaml: "),
    ("--config list.yaml", "--config list.yaml: it has no arguments"),
]


@pytest.mark.parametrize("line, message", BAD_ARGUMENTS)
def test_bad_arguments(folder, line, message):
    with pytest.raises(InputError, match=message):
        parse_arguments(line.split())
    assert not (folder / "out").exists()


def test_an_unknown_argument_in_a_file_is_one_line_with_what_was_meant(folder, capsys):
    (folder / "wrong.yaml").write_text("max_step: 3\n")
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["--config", "wrong.yaml"])
    said = "run_translation.py: error: unknown argument --max_step: did you mean --max_steps?\n"
    assert capsys.readouterr().err == said


def saved_model(folder):
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.zeros(4)}, folder / "model.safetensors")


def test_a_folder_without_a_tokenizer(folder):
    saved_model(folder)
    arguments = [*TRAIN.split(), "--model_name_or_path", str(folder)]
    with pytest.raises(InputError, match=r"no tokenizer.json .*--tokenizer_name"):
        parse_arguments(arguments)
    parse_arguments([*arguments, "--tokenizer_name", "some/name"])


def test_a_cut_model(folder):
    saved_model(folder)
    (folder / "tokenizer.json").touch()
    whole = (folder / "model.safetensors").read_bytes()
    for cut in (whole[:-1], whole[:20], b""):
        (folder / "model.safetensors").write_bytes(cut)
        with pytest.raises(InputError, match="model.safetensors is damaged or truncated"):
            parse_arguments([*TRAIN.split(), "--model_name_or_path", str(folder)])


def test_an_output_folder_that_can_be_made_is_not_made_yet(folder):
    before = set(folder.iterdir())
    check_output_dir("a/b/c")
    assert set(folder.iterdir()) == before
    with pytest.raises(InputError, match="cannot be created or written to"):
        check_output_dir("x" * 300)
    (folder / "a file").touch()
    for name in ("", "a file"):
        with pytest.raises(InputError, match=f"--output_dir '{name}' is no folder"):
            check_output_dir(name)


def test_a_full_output_folder_is_left_alone(folder):
    (folder / "out").mkdir()
    (folder / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="out has files in it.*--overwrite_output_dir"):
        parse_arguments(TRAIN.split())
    parse_arguments([*TRAIN.split(), "--overwrite_output_dir"])
    assert (folder / "out" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("given", "state", "is_refused"),
    [
        ("--num_train_epochs 3", {"global_step": 12, "epoch": 3.0}, True),
        ("--num_train_epochs 4", {"global_step": 12, "epoch": 3.0}, False),
        ("--max_steps 12", {"global_step": 12, "epoch": 2.5}, True),
        ("--max_steps 13", {"global_step": 12, "epoch": 2.5}, False),
        ("--max_steps 12 --overwrite_output_dir", {"global_step": 12, "epoch": 2.5}, False),
    ],
)
@pytest.mark.parametrize("resumed", ["", "out/checkpoint-12", "other"])
def test_a_run_that_has_ended_does_not_train_on(folder, given, state, is_refused, resumed):
    for name in ["other"] if resumed == "other" else ["out/checkpoint-12", "out"]:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "trainer_state.json").write_text(json.dumps(state))
    command = [*TRAIN.split(), *given.split()]
    command += ["--resume_from_checkpoint", resumed] if resumed else []
    if is_refused or (resumed and "overwrite" in given):
        with pytest.raises(InputError, match="has ended after 12 steps"):
            parse_arguments(command)
    else:
        parse_arguments(command)


def test_a_checkpoint_of_another_model_is_named(folder):
    checkpoint = folder / "out" / "checkpoint-5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    T5Config(d_model=64).save_pretrained(checkpoint)
    *_, args = parse_arguments(TRAIN.split())
    assert checkpoint_of(args, False, T5Config(d_model=64)) == "out/checkpoint-5"
    assert checkpoint_of(args, True, T5Config()) is None
    for config, named in ((T5Config(), "d_model is 64, and here 512"), (BartConfig(), "model_t")):
        with pytest.raises(InputError, match=f"out/checkpoint-5 is a checkpoint .*{named}"):
            checkpoint_of(args, False, config)


def test_the_demonstration_gives_way_to_explicit_arguments(folder):
    _model_args, data_args, args = parse_arguments("--learning_rate 0.5 --do_train".split())
    assert args.learning_rate == 0.5
    assert (args.do_train, args.do_eval, args.do_predict) == (True, False, False)
    assert args.per_device_train_batch_size == 32
    assert data_args.overwrite_output_dir
    assert (data_args.source_lang, data_args.target_lang) == ("en", "de")
    _, data_args, _ = parse_arguments("--do_train --output_dir mine".split())
    assert not data_args.overwrite_output_dir


def test_a_named_model_gets_the_usual_defaults(folder):
    saved_model(folder)
    (folder / "tokenizer.json").touch()
    line = f"--model_name_or_path {folder} --do_train --output_dir out"
    _, _, args = parse_arguments(line.split())
    assert (args.learning_rate, args.per_device_train_batch_size, args.bf16) == (5e-5, 8, False)


def test_generation_settings_reach_the_trainer(folder):
    _, _, args = parse_arguments([*TRAIN.split(), "--num_beams", "3", "--max_target_length", "17"])
    assert (args.generation_num_beams, args.generation_max_length) == (3, 17)


def read(path, languages=LANGUAGES):
    return list(read_pairs(open_records(str(path), "--train_file"), languages))


BAD_FILES = [
    ("a.docx", "Germany", "must end in one of .json, .jsonl, .csv, .tsv"),
    ("a.txt", "Germany", "no column 'en' for --source_lang; the columns are text"),
    ("header.csv", "en,de\n", "it is empty"),
    ("a.jsonl", PAIR + '{"en', "line 2: not valid JSON .*one record in each line"),
    ("list.jsonl", "[1, 2]", "line 1: a record must be an object"),
    ("latin.csv", "en,de\nZurich,Zürich\n", "not UTF-8"),
    ("null.jsonl", '{"en": "Germany", "de": null}', r"\('de'\) is None; it must be a string"),
    ("a.tsv", "en\tde\nGermany\n", r"line 2: the text for --target_lang \('de'\) is None"),
    ("fr.csv", "en,fr\na,b\n", "no column 'de' for --target_lang; the columns are en, fr"),
]


@pytest.mark.parametrize("name, text, message", BAD_FILES)
def test_bad_files(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=f"^--train_file .*{name}.*{message}"):
        read(tmp_path / name)


def test_a_language_code_with_a_region(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(PAIR)
    pairs = read(path, {"source": "en_XX", "target": "de_DE"})
    assert pairs == [{"source": "Germany", "target": "Deutschland"}]


@pytest.mark.parametrize("name", ["run.yaml", "run.json"])
def test_arguments_in_a_file_are_overridden_by_those_of_the_command_line(folder, name):
    given = {"train_file": "train.jsonl", "source_lang": "en", "target_lang": "de", "seed": None}
    given |= {"output_dir": "out", "do_train": True, "do_eval": False, "report_to": ["none"]}
    given |= {"source_prefix": "translate to German: ", "learning_rate": 3e-5, "max_steps": 7}
    given |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}}
    write = json.dumps if name.endswith("json") else yaml.safe_dump
    (folder / name).write_text(write(given))
    _, data_args, args = parse_arguments(["--config", name, "--max_steps", "9"])
    assert data_args.source_prefix == given["source_prefix"]
    assert (args.learning_rate, args.max_steps, args.seed) == (3e-5, 9, 42)
    assert args.do_train and not args.do_eval and args.report_to == []
    assert args.lr_scheduler_kwargs == {"min_lr": 1e-6}
