"""run_distill.py from the command line: teachers, students and data of several kinds, and errors
for bad input.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)

from distill.cache import TeacherCache
from distill.corpus import train_tokenizer
from distill.minicodformer import MiniCodformerConfig, MiniCodformerForCausalLM
from tests.processes import REPOSITORY, fork_ranks

# More than the limits of the two processes that the fixtures start.
pytestmark = pytest.mark.timeout(600)

SCRIPTS = REPOSITORY / "tests" / "distill" / "scripts"
COMMANDS = SCRIPTS / "commands.py"
LINES = [f"def add_{i}(a, b):\n    return a + b + {i}\n" for i in range(40)]
COMMON = [
    "--max_length", "32", "--max_steps", "3", "--per_device_train_batch_size", "4",
    "--logging_steps", "1",
    "--learning_rate", "1e-3", "--save_strategy", "no", "--report_to", "none", "--disable_tqdm",
    "True",
    "--ddp_find_unused_parameters", "False", "--do_train", "--do_eval",
]  # fmt: skip
PAIRS = [
    "--source_column", "translation.en", "--target_column", "translation.de", "--source_prefix",
    "translate: ", "--max_length", "32",
]  # fmt: skip


def make_models(folder: Path) -> None:
    """Make a causal teacher, an encoder-decoder teacher, and another tokenizer for a student."""
    tokenizer = train_tokenizer(LINES, 290)
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    # The head has more rows than the tokenizer has tokens, as in many large models.
    teacher = LlamaForCausalLM(
        LlamaConfig(vocab_size=304, tie_word_embeddings=True, **sizes, **tokens)
    )
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4,
        **tokens,
                 decoder_start_token_id=0)
    )  # fmt: skip
    for name, model in (("teacher", teacher), ("t5", t5.bfloat16())):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    other = train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 9, 270)
    other.save_pretrained(folder / "other_tokenizer")
    student = MiniCodformerConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, pad_token_id=0
    )
    student.save_pretrained(folder / "minicodformer")
    small = LlamaConfig(vocab_size=len(other), **{**sizes, "num_hidden_layers": 1}, **tokens)
    small.save_pretrained(folder / "other_student")
    few = LlamaForCausalLM(LlamaConfig(vocab_size=7, **{**sizes, "num_hidden_layers": 1}))
    for name, model in (("few_tokens", few), ("cut", teacher)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def make_data(folder: Path) -> None:
    (folder / "text.txt").write_text("".join(LINES))
    dialogues = [
        {"messages": [{"role": "user", "content": "add"}, {"role": "assistant", "content": x}]}
        for x in LINES
    ]
    (folder / "dialogues.json").write_text(json.dumps(dialogues))
    (folder / "turns.jsonl").write_text("\n".join(json.dumps(["add", x]) for x in LINES))
    pairs = [{"translation": {"en": f"number {i}", "de": f"Nummer {i}"}} for i in range(24)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "blank.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
    (folder / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')


QUANTIZED = [
    *COMMON, "--teacher_model_name_or_path", "{}/teacher", "--teacher_load_in_8bit", "True",
    "--init_student_from_teacher", "0,3", "--train_file", "{}/text.txt", "--validation_file",
    "{}/text.txt", "--temperature", "2",
]  # fmt: skip
JOBS: dict[str, list[str]] = {
    "layers": [
        *COMMON, "--teacher_model_name_or_path", "{}/teacher", "--init_student_from_teacher", "0,3",
        "--train_file", "{}/text.txt", "--validation_file", "{}/text.txt", "--temperature", "2",
        "--temperature_schedule", "linear", "--loss_type", "skew_reverse_kl", "--push_to_hub",
        "True", "--hub_model_id", "me/student", "--output_dir", "{}/out_layers",
    ],
    "teacher_device": [
        *COMMON, "--teacher_model_name_or_path", "{}/teacher", "--init_student_from_teacher", "0,3",
        "--train_file", "{}/text.txt", "--validation_file", "{}/text.txt", "--temperature", "2",
        "--temperature_schedule", "linear", "--loss_type", "skew_reverse_kl", "--teacher_device",
        "cpu",
        "--output_dir", "{}/out_teacher_device",
    ],
    "quantized": [*QUANTIZED, "--output_dir", "{}/out_quantized"],
    "minicodformer": [
        *COMMON, "--teacher_model_name_or_path", "{}/teacher", "--student_config",
        "{}/minicodformer",
        "--train_file", "{}/dialogues.json", "--validation_file", "{}/turns.jsonl",
        "--export_dtype", "float16",
        "--packing", "False", "--output_dir", "{}/out_minicodformer",
    ],
    "cache": [
        "cache_teacher", "--teacher_model_name_or_path", "{}/teacher", "--train_file",
        "{}/text.txt",
        "--max_length", "32", "--top_k", "8", "--teacher_cache", "{}/cache",
    ],
    "from_cache": [
        *COMMON, "--teacher_cache", "{}/cache", "--tokenizer_name", "{}/teacher",
        "--student_config",
        "{}/minicodformer", "--train_file", "{}/text.txt", "--validation_file", "{}/text.txt",
        "--output_dir", "{}/out_from_cache",
    ],
    "cache of other data": [
        *COMMON, "--teacher_cache", "{}/cache", "--tokenizer_name", "{}/teacher",
        "--student_config",
        "{}/minicodformer", "--train_file", "{}/text.txt", "--validation_file", "{}/text.txt",
        "--output_dir", "{}/out_other", "--temperature", "3",
    ],
    "uld": [
        *COMMON, "--teacher_model_name_or_path", "{}/teacher", "--student_config",
        "{}/other_student",
        "--tokenizer_name", "{}/other_tokenizer", "--loss_type", "uld", "--train_file",
        "{}/turns.jsonl",
        "--validation_file", "{}/text.txt", "--output_dir", "{}/out_uld",
    ],
    "other tokenizer": [
        *COMMON, "--teacher_model_name_or_path", "{}/teacher", "--student_config",
        "{}/other_student",
        "--tokenizer_name", "{}/other_tokenizer", "--train_file", "{}/text.txt",
        "--validation_file",
        "{}/text.txt", "--output_dir", "{}/out_refused",
    ],
    "t5": [
        *COMMON, "--teacher_model_name_or_path", "{}/t5", "--init_student_from_teacher", "best:2",
        "--train_file", "{}/pairs.jsonl", "--validation_file", "{}/pairs.jsonl", "--test_file",
        "{}/pairs.jsonl",
        *PAIRS, "--do_predict", "--predict_with_generate", "True", "--generation_max_length", "8",
        "--export_dtype", "float32", "--output_dir", "{}/out_t5",
    ],
    "cache of t5": [
        "cache_teacher", "--teacher_model_name_or_path", "{}/t5", "--train_file", "{}/pairs.jsonl",
        *PAIRS, "--cache_sampling", "importance", "--top_k", "12", "--teacher_cache", "{}/cache_t5",
    ],
    "too many tokens": [
        "cache_teacher", "--teacher_model_name_or_path", "{}/t5", "--train_file", "{}/pairs.jsonl",
        *PAIRS, "--top_k", "100000", "--teacher_cache", "{}/cache_of_too_many",
    ],
    "t5_from_cache": [
        *COMMON, "--teacher_cache", "{}/cache_t5", "--teacher_model_name_or_path", "{}/t5",
        "--init_student_from_teacher", "1,3", "--train_file", "{}/pairs.jsonl", "--validation_file",
        "{}/pairs.jsonl", *PAIRS, "--output_dir", "{}/out_t5_from_cache",
    ],
    "samples for another loss": [
        *COMMON, "--teacher_cache", "{}/cache_t5", "--teacher_model_name_or_path", "{}/t5",
        "--init_student_from_teacher", "1,3", "--train_file", "{}/pairs.jsonl", "--validation_file",
        "{}/pairs.jsonl", *PAIRS, "--loss_type", "jsd", "--output_dir", "{}/out_jsd",
    ],
    "broken": [
        *COMMON, "--teacher_model_name_or_path", "{}/teacher", "--init_student_from_teacher", "0",
        "--train_file", "{}/broken.jsonl", "--validation_file", "{}/text.txt", "--output_dir",
        "{}/out_broken",
    ],
    "no text": [
        *COMMON, "--teacher_model_name_or_path", "{}/teacher", "--init_student_from_teacher", "0",
        "--train_file", "{}/blank.jsonl", "--validation_file", "{}/text.txt", "--output_dir",
        "{}/out_blank",
    ],
    "cut teacher": [
        *COMMON, "--teacher_model_name_or_path", "{}/cut", "--init_student_from_teacher", "0",
        "--train_file", "{}/text.txt", "--validation_file", "{}/text.txt", "--output_dir",
        "{}/out_cut",
    ],
    "small vocabulary": [
        *COMMON, "--kd_alpha", "0", "--model_name_or_path", "{}/few_tokens",
        "--train_file", "{}/text.txt", "--validation_file", "{}/text.txt", "--output_dir",
        "{}/out_few",
    ],
    "no such layer": [
        *COMMON, "--teacher_model_name_or_path", "{}/teacher", "--init_student_from_teacher", "0,9",
        "--train_file", "{}/text.txt", "--validation_file", "{}/text.txt", "--output_dir",
        "{}/out_layer",
    ],
    "prefix of a causal model": [
        *COMMON, "--teacher_model_name_or_path", "{}/teacher", "--init_student_from_teacher", "0",
        "--train_file", "{}/text.txt", "--validation_file", "{}/text.txt", "--output_dir",
        "{}/out_prefix", "--source_prefix", "translate: ",
    ],
    "too many layers": [
        *COMMON, "--teacher_model_name_or_path", "{}/t5", "--init_student_from_teacher", "best:5",
        "--train_file", "{}/pairs.jsonl", "--validation_file", "{}/pairs.jsonl", *PAIRS,
        "--output_dir", "{}/out_layers_of_t5",
    ],
    "another kind": [
        *COMMON, "--teacher_model_name_or_path", "{}/t5", "--student_config", "{}/minicodformer",
        "--train_file", "{}/text.txt", "--validation_file", "{}/text.txt", "--output_dir",
        "{}/out_kind",
    ],
    "no student": [*COMMON, "--teacher_model_name_or_path", "{}/teacher", "--train_file",
    "{}/text.txt",
                   "--validation_file", "{}/text.txt", "--output_dir", "{}/out_none"],
    "tokenizer of another teacher": [
        "cache_teacher", "--teacher_model_name_or_path", "{}/teacher", "--tokenizer_name",
        "{}/other_tokenizer", "--train_file", "{}/text.txt", "--top_k", "8", "--teacher_cache",
        "{}/cache_none",
    ],
    "generation by a causal model": [
        *COMMON, "--model_name_or_path", "{}/teacher", "--kd_alpha", "0", "--train_file",
        "{}/text.txt", "--validation_file", "{}/text.txt", "--test_file", "{}/text.txt",
        "--do_predict", "--predict_with_generate", "--output_dir", "{}/out_none",
    ],
    "answers after the end": [
        *COMMON, "--model_name_or_path", "{}/teacher", "--kd_alpha", "0", "--train_file",
        "{}/turns.jsonl", "--validation_file", "{}/turns.jsonl", "--packing", "False",
        "--max_length", "4", "--output_dir", "{}/out_none",
    ],
    "top k of a live teacher": [
        *COMMON, "--teacher_model_name_or_path", "{}/teacher", "--init_student_from_teacher", "0",
        "--train_file", "{}/text.txt", "--validation_file", "{}/text.txt", "--top_k", "500",
        "--output_dir", "{}/out_none",
    ],
    "longer than positions": [
        *COMMON, "--student_config", "{}/minicodformer", "--tokenizer_name", "{}/teacher",
        "--kd_alpha", "0", "--train_file", "{}/text.txt", "--validation_file", "{}/text.txt",
        "--max_length", "513", "--output_dir", "{}/out_none",
    ],
    "wrong temperature": [*COMMON, "--temperature", "0", "--output_dir", "{}/out_none"],
    "misspelt": [*COMMON, "--temprature", "2", "--output_dir", "{}/out_none"],
    "misspelt folder": [
        *COMMON, "--teacher_model_name_or_path", "{}/taecher", "--init_student_from_teacher", "0",
        "--train_file", "{}/text.txt", "--validation_file", "{}/text.txt", "--output_dir",
        "{}/out_none",
    ],
    "misspelt column": [
        *COMMON, "--model_name_or_path", "{}/teacher", "--kd_alpha", "0", "--train_file",
        "{}/text.txt", "--validation_file", "{}/text.txt", "--text_column", "body", "--output_dir",
        "{}/out_none",
    ],
}  # fmt: skip


SHIPPED = REPOSITORY / "configs" / "ds_config_distill.json"
RESUMABLE = [
    *COMMON, "--teacher_model_name_or_path", "{}/teacher", "--init_student_from_teacher", "0,3",
    "--train_file", "{}/text.txt", "--validation_file", "{}/text.txt", "--deepspeed",
    "{}/stage3.json",
    "--lr_scheduler_type", "constant", "--save_strategy", "steps", "--save_steps", "2",
]  # fmt: skip
SHARDED: dict[str, list[str]] = {
    "shipped": [
        *COMMON, "--teacher_model_name_or_path", "{}/teacher", "--student_config",
        "{}/minicodformer",
        "--train_file", "{}/text.txt", "--validation_file", "{}/text.txt", "--deepspeed",
        str(SHIPPED),
        "--per_device_train_batch_size", "16", "--learning_rate", "2e-5", "--output_dir",
        "{}/out_shipped",
    ],
    "on_policy": [
        *COMMON, "--teacher_model_name_or_path", "{}/teacher", "--init_student_from_teacher",
        "best:2", "--lmbda", "0.5",
        "--seq_kd", "True", "--max_new_tokens", "5", "--loss_type", "jsd", "--train_file",
        "{}/turns.jsonl",
        "--validation_file", "{}/text.txt", "--deepspeed", "{}/stage3.json", "--output_dir",
        "{}/out_on_policy",
    ],
    "quantized": [
        *QUANTIZED, "--deepspeed", "{}/stage3.json", "--output_dir", "{}/out_quantized_sharded",
    ],
    "whole": [*RESUMABLE, "--max_steps", "4", "--output_dir", "{}/out_whole"],
    "half": [*RESUMABLE, "--max_steps", "2", "--output_dir", "{}/out_resumed"],
    "resumed": [
        *RESUMABLE, "--max_steps", "4", "--output_dir", "{}/out_resumed",
        "--resume_from_checkpoint", "{}/out_resumed/checkpoint-2",
    ],
    "cache": [
        "cache_teacher", "--teacher_model_name_or_path", "{}/teacher", "--train_file",
        "{}/text.txt",
        "--max_length", "32", "--top_k", "8", "--teacher_cache", "{}/cache_of_two", "--deepspeed",
        "{}/stage3.json",
    ],
}  # fmt: skip
STAGE_3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run_distill")
    make_models(folder)
    make_data(folder)
    zero = {**STAGE_3["zero_optimization"], "stage3_gather_16bit_weights_on_model_save": True}
    (folder / "stage3.json").write_text(json.dumps({**STAGE_3, "zero_optimization": zero}))
    return folder


def run_jobs(folder: Path, jobs: dict[str, list[str]], ranks: int) -> dict[str, Any]:
    path = folder / f"jobs{ranks}.json"
    path.write_text(json.dumps([[word.format(folder) for word in job] for job in jobs.values()]))
    process = fork_ranks(COMMANDS, path, nproc=ranks, timeout=240)
    assert process.returncode == 0, process.stdout + process.stderr
    results = dict(zip(jobs, json.loads(path.with_suffix(".out").read_text()), strict=True))
    return {"folder": folder, "results": results, "stdout": process.stdout}


@pytest.fixture(scope="module")
def finished(folder) -> dict[str, Any]:
    return run_jobs(folder, JOBS, ranks=0)


@pytest.fixture(scope="module")
def sharded(folder) -> dict[str, Any]:
    return run_jobs(folder, SHARDED, ranks=2)


def figures(finished, name: str) -> dict[str, float]:
    assert finished["results"][name] == [0, ""]
    return json.loads((finished["folder"] / f"out_{name}" / "eval_results.json").read_text())


def test_the_log_says_what_is_packed(finished):
    assert re.search(
        r"--train_file: \d+ blocks of \d+ tokens, into which texts are packed", finished["stdout"]
    )
    assert re.search(r"--train_file: \d+ examples$", finished["stdout"], re.MULTILINE)


def test_a_student_cut_out_of_its_teacher(finished):
    found = figures(finished, "layers")
    assert found["eval_kd_loss"] > 0 and found["eval_teacher_ce"] > 0
    folder = finished["folder"] / "out_layers_on_the_hub"
    student = LlamaForCausalLM.from_pretrained(folder)
    assert student.config.num_hidden_layers == 2 and student.dtype == torch.bfloat16
    teacher = LlamaForCausalLM.from_pretrained(finished["folder"] / "teacher").state_dict()
    for ours, theirs in ((0, 0), (1, 3)):  # three small steps change it little
        weight = student.state_dict()[f"model.layers.{ours}.mlp.up_proj.weight"].float()
        assert (weight - teacher[f"model.layers.{theirs}.mlp.up_proj.weight"]).abs().max() < 0.01
    card = (folder / "README.md").read_text()
    words = ("run_distill.py", "| `loss_type` | skew_reverse_kl |", "train_runtime", "eval_ppl")
    assert all(word in card for word in words)
    written = pipeline("text-generation", model=str(folder))("def add", max_new_tokens=2)
    assert written[0]["generated_text"].startswith("def add")


def test_a_teacher_on_a_device_of_its_own_says_the_same(finished):
    found, expected = figures(finished, "teacher_device"), figures(finished, "layers")
    assert all(
        found[key] == value
        for key, value in expected.items()
        if "loss" in key or key == "eval_teacher_ce"
    )


def test_minicodformer_learns_from_dialogues_and_is_exported_in_fp16(finished):
    figures(finished, "minicodformer")
    folder = finished["folder"] / "out_minicodformer"
    assert all(
        weight.dtype == torch.float16 for weight in load_file(folder / "model.safetensors").values()
    )
    model, tokenizer = (
        MiniCodformerForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    ids = tokenizer("def add_1(", return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=4).shape[1] > ids.shape[1]


def test_a_student_learns_from_the_cache(finished):
    assert finished["results"]["cache"] == [0, ""]
    assert "eval_loss" in figures(finished, "from_cache")


def test_a_t5_learns_from_a_cache_of_sampled_tokens(finished):
    assert finished["results"]["cache of t5"] == [0, ""]
    assert TeacherCache(finished["folder"] / "cache_t5").description.sampling == "importance"
    assert "eval_loss" in figures(finished, "t5_from_cache")


def test_uld_takes_another_tokenizer(finished):
    assert figures(finished, "uld")["eval_kd_loss"] > 0


def test_t5_is_scored_with_bleu(finished):
    figures(finished, "t5")
    folder = finished["folder"] / "out_t5"
    assert "predict_bleu" in json.loads((folder / "predict_results.json").read_text())
    assert len((folder / "generated_predictions.txt").read_text().splitlines()) == 24
    student = T5ForConditionalGeneration.from_pretrained(folder)
    assert student.config.num_layers == 2
    # The teacher is in bf16. There the student would lose small updates.
    assert any(not torch.equal(p, p.bfloat16().float()) for p in student.parameters())


@pytest.mark.parametrize(
    "name, words",
    [
        ("other tokenizer", ["different tokenizers", "--loss_type uld"]),
        ("cache of other data", ["different temperature", "cache_teacher"]),
        ("samples for another loss", ["cache_t5 holds sampled tokens", "forward_kl"]),
        ("too many tokens", ["--top_k 100000", "less than the"]),
        ("broken", ["broken.jsonl, line 2: not valid JSON"]),
        ("no text", ["--train_file", "blank.jsonl: there is nothing in it"]),
        (
            "cut teacher",
            ["--teacher_model_name_or_path", "model.safetensors is damaged or truncated"],
        ),
        ("small vocabulary", ["--model_name_or_path", "embeddings for 7 tokens"]),
        ("no such layer", ["'9' is not a layer", "0 to 3"]),
        ("too many layers", ["best:5", "from 1 to 4"]),
        ("prefix of a causal model", ["--source_prefix is for encoder-decoder models"]),
        ("another kind", ["(minicodformer) is a causal model", "(t5) an encoder-decoder"]),
        ("tokenizer of another teacher", ["leave out --tokenizer_name"]),
        ("generation by a causal model", ["--predict_with_generate is for encoder-decoder"]),
        ("answers after the end", ["--train_file", "no answer begins within --max_length 4"]),
        ("top k of a live teacher", ["top_k is 500", "less than the"]),
        ("longer than positions", ["--max_length 513", "student has only 512 positions"]),
        ("no student", ["there is no student", "--student_config"]),
        ("wrong temperature", ["temperature is 0", "positive"]),
        ("misspelt", ["--temprature", "did you mean --temperature?"]),
        ("misspelt folder", ["--teacher_model_name_or_path", "taecher: no such folder"]),
        ("misspelt column", ["--train_file", "'body' for --text_column; the columns are text"]),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(finished, name, words):
    code, message = finished["results"][name]
    assert code == 2 and message.startswith("run_distill.py: error:"), message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "bound, steps", [(["--max_steps", "2"], 2), (["--num_train_epochs", "0.5"], 3)]
)
def test_what_bounds_the_demonstration_bounds_all_of_it(tmp_path, bound, steps):
    process = fork_ranks(
        SCRIPTS / "demonstration.py", "--output_dir", str(tmp_path), "--max_train_tokens", "6144",
        *bound, nproc=0, timeout=240,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    said = f"a teacher of {steps} steps, then two students of {steps} steps each"
    assert said in process.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert {name: each["step"] for name, each in report.items()} == dict.fromkeys(report, steps)


def test_the_shipped_configuration_shards_student_and_teacher(sharded):
    assert figures(sharded, "shipped")["eval_kd_loss"] > 0
    student = MiniCodformerForCausalLM.from_pretrained(sharded["folder"] / "out_shipped")
    assert all(parameter.isfinite().all() for parameter in student.parameters())


def test_a_distillation_goes_on_from_a_checkpoint(sharded):
    assert sharded["results"]["half"] == [0, ""]
    found, expected = figures(sharded, "resumed"), figures(sharded, "whole")
    assert (
        found["eval_loss"] == expected["eval_loss"]
        and found["eval_kd_loss"] == expected["eval_kd_loss"]
    )
    history = json.loads((sharded["folder"] / "out_resumed" / "trainer_state.json").read_text())[
        "log_history"
    ]
    assert [entry["step"] for entry in history if "loss" in entry] == [1, 2, 3, 4]


def test_models_write_their_batches_under_sharding(sharded):
    assert figures(sharded, "on_policy")["eval_kd_loss"] > 0
    state = sharded["folder"] / "out_on_policy" / "trainer_state.json"
    logs = [log for log in json.loads(state.read_text())["log_history"] if "loss" in log]
    written = [(log["written_by_student"], log["written_by_teacher"]) for log in logs]
    assert {(1, 0), (0, 1)} == set(written)  # each step is one batch


def test_a_quantized_teacher_says_the_same_sharded_and_whole(finished, sharded):
    plain, whole = figures(finished, "layers"), figures(finished, "quantized")
    assert sharded["results"]["quantized"] == [0, ""]
    path = sharded["folder"] / "out_quantized_sharded" / "eval_results.json"
    found = json.loads(path.read_text())["eval_teacher_ce"]
    assert found == pytest.approx(whole["eval_teacher_ce"], rel=1e-6)
    assert abs(found - plain["eval_teacher_ce"]) > 1e-5  # it is quantized


def test_two_ranks_write_the_cache_that_one_writes(finished, sharded):
    assert sharded["results"]["cache"] == [0, ""]
    one, two = (
        TeacherCache(sharded["folder"] / "cache"),
        TeacherCache(sharded["folder"] / "cache_of_two"),
    )
    assert one.description == two.description
    assert one._where.keys() == two._where.keys() and len(one) > 1
    stored = sum(len(file.get_tensor("keys")) for file in two._files)
    assert stored == len(two)  # none twice
