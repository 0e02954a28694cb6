"""run_distill.py from the command line: teachers, students and data of several kinds, and errors
for bad input.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
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
from tests.hf import distill_runs
from tests.hf.distill_runs import (
    LINES,
    SCRIPTS,
    SIZES,
    TOKENIZER,
    log,
    run_jobs,
    save_llama,
    write_stage_3,
)
from tests.processes import REPOSITORY, fork_ranks

# More than the limits of the two processes that the fixtures start.
pytestmark = pytest.mark.timeout(600)


def make_models(folder: Path) -> None:
    """Make a causal teacher, an encoder-decoder teacher, and another tokenizer for a student."""
    # The head has more rows than the tokenizer has tokens, as in many large models.
    sizes = {"vocab_size": 304, "tie_word_embeddings": True, "initializer_range": 0.02}
    for name in ("teacher", "cut"):
        save_llama(folder / name, 4, **sizes)
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    save_llama(folder / "few_tokens", 1, vocab_size=7)
    t5 = T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(TOKENIZER), d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4,
            pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        )
    )  # fmt: skip
    t5.bfloat16().save_pretrained(folder / "t5")
    TOKENIZER.save_pretrained(folder / "t5")
    other = train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 9, 270)
    other.save_pretrained(folder / "other_tokenizer")
    sizes = SIZES | {"vocab_size": len(other), "num_hidden_layers": 1}
    LlamaConfig(**sizes).save_pretrained(folder / "other_student")
    MiniCodformerConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=32, pad_token_id=0
    ).save_pretrained(folder / "minicodformer")


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


COMMON = (
    f"{distill_runs.COMMON} --do_eval --max_length 32 --max_steps 3 --learning_rate 1e-3 "
    "--per_device_train_batch_size 4 --save_strategy no"
)
TEACHER = "--teacher_model_name_or_path {}/teacher"
T5 = "--teacher_model_name_or_path {}/t5"
TRAIN, VALIDATION = "--train_file {}/text.txt", "--validation_file {}/text.txt"
TEXT = f"{TRAIN} {VALIDATION}"
MINICODFORMER = "--student_config {}/minicodformer"
OF_LAYERS = f"{COMMON} {TEACHER} --init_student_from_teacher 0,3 {TEXT} --temperature 2"
PAIRS = (
    "--train_file {}/pairs.jsonl --source_column translation.en --target_column translation.de "
    "--source_prefix translate: --max_length 32"
)
OF_T5 = f"{COMMON} {T5} {PAIRS} --validation_file {{}}/pairs.jsonl --init_student_from_teacher"
TO_CACHE = f"cache_teacher {TEACHER} {TRAIN} --max_length 32 --top_k 8 --teacher_cache {{}}"
T5_TO_CACHE = f"cache_teacher {T5} {PAIRS} --teacher_cache {{}}"
FROM_CACHE = (
    f"{COMMON} --teacher_cache {{}}/cache --tokenizer_name {{}}/teacher {MINICODFORMER} {TEXT}"
)
OTHER = "--student_config {}/other_student --tokenizer_name {}/other_tokenizer"
ALONE = f"{COMMON} --kd_alpha 0 --model_name_or_path {{}}/"
JOBS = {
    "layers": f"{OF_LAYERS} --temperature_schedule linear --loss_type skew_reverse_kl "
    "--push_to_hub True --hub_model_id me/student",
    "quantized": f"{OF_LAYERS} --teacher_load_in_8bit True",
    "dialogues": f"{COMMON} {TEACHER} {MINICODFORMER} --train_file {{}}/dialogues.json "
    "--validation_file {}/turns.jsonl --export_dtype float16 --packing False",
    "cache": f"{TO_CACHE}/cache",
    "from_cache": FROM_CACHE,
    "uld": f"{COMMON} {TEACHER} {OTHER} --loss_type uld --train_file {{}}/turns.jsonl {VALIDATION}",
    "bleu": f"{OF_T5} best:2 --test_file {{}}/pairs.jsonl --do_predict --predict_with_generate "
    "--generation_max_length 8 --export_dtype float32",
    "cache of t5": f"{T5_TO_CACHE}/cache_t5 --cache_sampling importance --top_k 12",
    "t5_from_cache": f"{OF_T5} 1,3 --teacher_cache {{}}/cache_t5",
}
# What the command refuses, beside what the tests of its parts refuse, and words of the line.
REFUSED = {
    "other temperature": (f"{FROM_CACHE} --temperature 3", "different temperature.*cache_teacher"),
    "other tokenizer": (f"{COMMON} {TEACHER} {OTHER} {TEXT}", "different tokenizers.*type uld"),
    "too many": (f"{T5_TO_CACHE}/too_many --top_k 100000", "--top_k 100000.*less than the"),
    "samples": (
        f"{OF_T5} 1,3 --teacher_cache {{}}/cache_t5 --loss_type jsd",
        "cache_t5 holds sampled tokens.*forward_kl",
    ),
    "cut teacher": (
        f"{COMMON} --teacher_model_name_or_path {{}}/cut --init_student_from_teacher 0 {TEXT}",
        "--teacher_model_name_or_path.*model.safetensors is damaged or truncated",
    ),
    "few tokens": (f"{ALONE}few_tokens {TEXT}", "--model_name_or_path.*embeddings for 7 tokens"),
    "two kinds": (
        f"{COMMON} {T5} {MINICODFORMER} {TEXT}",
        r"\(minicodformer\) is a causal model.*\(t5\) an encoder-decoder",
    ),
    "no student": (f"{COMMON} {TEACHER} {TEXT}", "there is no student.*--student_config"),
    "tokenizer of another": (
        f"{TO_CACHE}/none --tokenizer_name {{}}/other_tokenizer",
        "leave out --tokenizer_name",
    ),
    "generation": (
        f"{ALONE}teacher {TEXT} --test_file {{}}/text.txt --do_predict --predict_with_generate",
        "--predict_with_generate is for encoder-decoder",
    ),
    "answers after the end": (
        f"{ALONE}teacher --packing False --train_file {{}}/turns.jsonl {VALIDATION} --max_length 4",
        "--train_file.*no answer begins within --max_length 4",
    ),
    "top k": (f"{OF_LAYERS} --top_k 500", "top_k is 500.*less than the"),
    "positions": (
        f"{COMMON} {MINICODFORMER} --tokenizer_name {{}}/teacher --kd_alpha 0 {TEXT} "
        "--max_length 513",
        "--max_length 513.*student has only 512 positions",
    ),
}
STAGE_3 = "--deepspeed {}/stage3.json"
SHARDED = {
    "shipped": f"{COMMON} {TEACHER} {MINICODFORMER} {TEXT} --per_device_train_batch_size 16 "
    f"--learning_rate 2e-5 --deepspeed {REPOSITORY}/configs/ds_config_distill.json",
    "on_policy": f"{COMMON} {TEACHER} --init_student_from_teacher best:2 --lmbda 0.5 --seq_kd True "
    f"--max_new_tokens 5 --loss_type jsd --train_file {{}}/turns.jsonl {VALIDATION} {STAGE_3}",
    "quantized_sharded": f"{JOBS['quantized']} {STAGE_3}",
    "cache_of_two": f"{TO_CACHE}/cache_of_two {STAGE_3}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run_distill")
    make_models(folder)
    make_data(folder)
    write_stage_3(folder)
    return folder


class Runs(NamedTuple):
    """Jobs that have ended."""

    folder: Path
    results: dict[str, Any]
    stdout: str

    def figures(self, name: str) -> dict[str, float]:
        assert self.results[name] == [0, ""]
        return json.loads((self.folder / name / "eval_results.json").read_text())


@pytest.fixture(scope="module")
def finished(folder) -> Runs:
    jobs = JOBS | {name: line for name, (line, _) in REFUSED.items()}
    return Runs(folder, *run_jobs(folder, jobs, ranks=0))


@pytest.fixture(scope="module")
def sharded(folder) -> Runs:
    return Runs(folder, *run_jobs(folder, SHARDED, ranks=2))


def test_a_student_cut_out_of_its_teacher(finished):
    assert re.search(r"--train_file: \d+ blocks of \d+ tokens, into which texts", finished.stdout)
    found = finished.figures("layers")
    assert found["eval_kd_loss"] > 0 and found["eval_teacher_ce"] > 0
    folder = finished.folder / "layers_on_the_hub"
    student = LlamaForCausalLM.from_pretrained(folder)
    assert student.config.num_hidden_layers == 2 and student.dtype == torch.bfloat16
    teacher = LlamaForCausalLM.from_pretrained(finished.folder / "teacher").state_dict()
    for ours, theirs in ((0, 0), (1, 3)):  # three small steps change it little
        weight = student.state_dict()[f"model.layers.{ours}.mlp.up_proj.weight"].float()
        assert (weight - teacher[f"model.layers.{theirs}.mlp.up_proj.weight"]).abs().max() < 0.01
    card = (folder / "README.md").read_text()
    assert "| `loss_type` | skew_reverse_kl |" in card and "eval_ppl" in card
    written = pipeline("text-generation", model=str(folder))("def add", max_new_tokens=2)
    assert written[0]["generated_text"].startswith("def add")


def test_minicodformer_learns_from_dialogues_and_is_exported_in_fp16(finished):
    finished.figures("dialogues")
    folder = finished.folder / "dialogues"
    model = MiniCodformerForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float16
    ids = AutoTokenizer.from_pretrained(folder)("def add_1(", return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=4).shape[1] > ids.shape[1]


@pytest.mark.parametrize("name", ["from_cache", "t5_from_cache", "uld"])
def test_a_student_learns(name, finished):
    found = finished.figures(name)
    assert found["eval_loss"] > 0 and (name != "uld" or found["eval_kd_loss"] > 0)


def test_t5_is_scored_with_bleu(finished):
    finished.figures("bleu")
    folder = finished.folder / "bleu"
    assert "predict_bleu" in json.loads((folder / "predict_results.json").read_text())
    assert len((folder / "generated_predictions.txt").read_text().splitlines()) == 24
    student = T5ForConditionalGeneration.from_pretrained(folder)
    assert student.config.num_layers == 2
    # The teacher is in bf16. There the student would lose small updates.
    assert any(not torch.equal(p, p.bfloat16().float()) for p in student.parameters())


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line_that_says_what_to_do(finished, name):
    code, message = finished.results[name]
    assert code == 2 and re.search(f"^run_distill.py: error:.*{REFUSED[name][1]}", message), message


def test_what_bounds_the_demonstration_bounds_all_of_it(tmp_path):
    """tests/distill/test_parts.py has other bounds."""
    line = f"--output_dir {tmp_path} --max_train_tokens 6144 --num_train_epochs 0.5"
    script = SCRIPTS / "demonstration.py"
    process = fork_ranks(script, *line.split(), nproc=0, timeout=240)
    assert process.returncode == 0, process.stderr
    assert "a teacher of 3 steps, then two students of 3 steps each" in process.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert {name: each["step"] for name, each in report.items()} == dict.fromkeys(report, 3)


def test_the_shipped_configuration_shards_student_and_teacher(sharded):
    assert sharded.figures("shipped")["eval_kd_loss"] > 0
    student = MiniCodformerForCausalLM.from_pretrained(sharded.folder / "shipped")
    assert all(parameter.isfinite().all() for parameter in student.parameters())


def test_models_write_their_batches_under_sharding(sharded):
    assert sharded.figures("on_policy")["eval_kd_loss"] > 0
    student, teacher = (
        log(sharded.folder / "on_policy", f"written_by_{each}") for each in ("student", "teacher")
    )
    assert {(1, 0), (0, 1)} == set(zip(student, teacher, strict=True))  # each step is one batch


def test_a_quantized_teacher_says_the_same_sharded_and_whole(finished, sharded):
    plain, whole = finished.figures("layers"), finished.figures("quantized")
    found = sharded.figures("quantized_sharded")["eval_teacher_ce"]
    assert found == pytest.approx(whole["eval_teacher_ce"], rel=1e-6)
    assert abs(found - plain["eval_teacher_ce"]) > 1e-5  # it is quantized


def test_two_ranks_write_the_cache_that_one_writes(finished, sharded):
    assert sharded.results["cache_of_two"] == [0, ""]
    one, two = (TeacherCache(sharded.folder / name) for name in ("cache", "cache_of_two"))
    assert one.description == two.description
    assert one._where.keys() == two._where.keys() and len(one) > 1
    stored = sum(len(file.get_tensor("keys")) for file in two._files)
    assert stored == len(two)  # none twice
