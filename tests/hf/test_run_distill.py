"""run_distill.py from the command line: teachers, students and data of several kinds, and errors
for bad input.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch.nn.functional import kl_div, log_softmax
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
    pipeline,
)

from distill import data
from distill.batch import IGNORED
from distill.cache import TeacherCache
from distill.corpus import train_tokenizer
from distill.minicodformer import MiniCodformerConfig, MiniCodformerForCausalLM
from tests.distill import models
from tests.hf.trainer_runs import AUTO, TIMEOUT
from tests.processes import REPOSITORY, fork_ranks
from tests.tolerance import assert_close, rounding

pytestmark = [
    # More than the limits of the two processes that the fixtures start.
    pytest.mark.timeout(900),
    # PEFT reads a property that transformers has renamed.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]


SCRIPTS = REPOSITORY / "tests" / "distill" / "scripts"
LINES = [f"def add_{i}(a, b):\n    return a + b + {i}\n" for i in range(40)]
TOKENIZER = train_tokenizer(LINES, 290)
SIZES = {"vocab_size": len(TOKENIZER), "intermediate_size": 48}
SIZES |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}


def save_llama(folder: Path, layers: int, **sizes: Any) -> None:
    models.causal(LlamaForCausalLM, 32, layers, layers, **SIZES | sizes).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)


def write_stage_3(folder: Path) -> None:
    section = {"stage": 3, "stage3_param_persistence_threshold": 100}
    section["stage3_gather_16bit_weights_on_model_save"] = True
    (folder / "stage3.json").write_text(json.dumps({"zero_optimization": section, **AUTO}))


def run_jobs(folder: Path, jobs: dict[str, str], ranks: int) -> tuple[dict[str, Any], str]:
    """Return the exit code and the message of each command line, and what all of them printed.

    They write to a folder of their own name, unless they say another one.
    """
    lines = []
    for name, job in jobs.items():
        lines.append([word.replace("{}", str(folder)) for word in job.split()])
        if "cache_teacher" not in job and "--output_dir" not in job:
            lines[-1] += ["--output_dir", str(folder / name)]
    path = folder / f"jobs{ranks}.json"
    path.write_text(json.dumps(lines))
    process = fork_ranks(SCRIPTS / "commands.py", path, nproc=ranks, timeout=1.5 * TIMEOUT)
    assert process.returncode == 0, process.stdout + process.stderr
    results = dict(zip(jobs, json.loads(path.with_suffix(".out").read_text()), strict=True))
    return results, process.stdout


def log(folder: Path, key: str = "loss") -> list[Any]:
    """The numbers in the log of a training, or its steps."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry[key] for entry in history if "loss" in entry]


def make_models(folder: Path) -> None:
    """Make a causal teacher, an encoder-decoder teacher, and another tokenizer for a student."""
    # The head has more rows than the tokenizer has tokens, as in many large models.
    sizes = {"vocab_size": 304, "tie_word_embeddings": True, "initializer_range": 0.02}
    save_llama(folder / "teacher", 4, **sizes)
    for name, layers in (("student", 2), ("small_teacher", 3)):
        save_llama(folder / name, layers)
    save_llama(folder / "few_tokens", 1, vocab_size=7)
    t5 = models.t5(32, 4, seed=0, vocabulary=len(TOKENIZER))
    t5.bfloat16().save_pretrained(folder / "t5")
    TOKENIZER.save_pretrained(folder / "t5")
    other = train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 9, 270)
    other.save_pretrained(folder / "other_tokenizer")
    save_llama(folder / "other_student", 1, vocab_size=len(other))
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


# `{}` stands for the folder of the models and the data.
COMMON = (
    "--logging_steps 1 --report_to none --disable_tqdm True --ddp_find_unused_parameters False "
    "--do_train --do_eval --max_length 32 --max_steps 3 --learning_rate 1e-3 "
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
STAGE_3 = "--deepspeed {}/stage3.json"
RATE, STEPS, ADAPTER = 0.5, 3, "adapter_model.safetensors"
CLOSE = rounding(torch.float32, 600, STEPS)
ADAPTED = (
    f"{COMMON} {TEXT} --use_peft True --lora_r 4 --lora_alpha 8 --lora_dropout 0 --kd_alpha 0.5 "
    f"--max_train_tokens 128 --learning_rate {RATE} --optim sgd --lr_scheduler_type constant "
    "--max_grad_norm 0 --model_name_or_path {}/student --teacher_model_name_or_path "
    "{}/small_teacher"
)
HALF = f"{ADAPTED} --per_device_train_batch_size 2 {STAGE_3}"


def interrupted(kind: str, ranks: int, own: str) -> dict[str, str]:
    """A whole run, and one that ends after half of the steps and is started again."""
    line = (
        f"{COMMON} --teacher_model_name_or_path {{}}/small_teacher --model_name_or_path "
        f"{{}}/student --train_file {{}}/turns.jsonl {VALIDATION} --packing False --export_dtype "
        f"float32 --lr_scheduler_type constant --save_strategy steps --save_steps 2 {own} "
        f"--per_device_train_batch_size {4 // ranks}"
    )
    return {
        f"{kind}_whole": f"{line} --max_steps 4",
        f"{kind}_half": f"{line} --max_steps 2 --logging_steps 2 --output_dir {{}}/{kind}_again",
        f"{kind}_again": f"{line} --max_steps 4",
    }


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
    "adapters": ADAPTED,
    "untrained": f"{ADAPTED} --learning_rate 0 --max_steps 1",
    **interrupted("files", 1, ""),
    **interrupted("streamed", 1, "--streaming True"),
    **interrupted("adapted", 1, "--use_peft True"),
}
# What the command refuses, beside what the tests of its parts refuse, and words of the line.
REFUSED = {
    "samples": (
        f"{OF_T5} 1,3 --teacher_cache {{}}/cache_t5 --loss_type jsd",
        "cache_t5 holds sampled tokens.*forward_kl",
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
    "no model": (
        f"{COMMON} --use_peft True --student_config {{}}/student --kd_alpha 0 {TEXT}",
        "--use_peft needs a trained student: give --model_name_or_path",
    ),
    "no layers": (f"{ADAPTED} --lora_target_modules nothing_like_it", "--lora_target_modules: "),
    "positions": (
        f"{COMMON} {MINICODFORMER} --tokenizer_name {{}}/teacher --kd_alpha 0 {TEXT} "
        "--max_length 513",
        "--max_length 513.*student has only 512 positions",
    ),
}
SHARDED = {
    "shipped": f"{COMMON} {TEACHER} {MINICODFORMER} {TEXT} --per_device_train_batch_size 16 "
    f"--learning_rate 2e-5 --deepspeed {REPOSITORY}/configs/ds_config_distill.json",
    "on_policy": f"{COMMON} {TEACHER} --init_student_from_teacher best:2 --lmbda 0.5 --seq_kd True "
    f"--max_new_tokens 5 --loss_type jsd --train_file {{}}/turns.jsonl {VALIDATION} {STAGE_3}",
    "quantized_sharded": f"{JOBS['quantized']} {STAGE_3}",
    "cache_of_two": f"{TO_CACHE}/cache_of_two {STAGE_3}",
    "adapters_sharded": HALF,
    "merged": f"{HALF} --merge_adapters True --export_dtype float32",
    "writes": f"{ADAPTED} {STAGE_3} --lora_target_modules all-linear --lmbda 1 --max_new_tokens 4 "
    "--hidden_loss_weight 0.1 --attn_relation_weight 0.1",
    **interrupted("sharded", 2, STAGE_3),
    **interrupted("shared_stream", 2, "--streaming True"),
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


# -- adapters


def by_hand(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and adapters of a loop of plain PEFT and torch."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    ids = data.encode([data.Segment("".join(LINES), True)], tokenizer)
    blocks = list(data.pack([ids], 32, 0))
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / name) for name in ("student", "small_teacher")
    )
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM")
    model = get_peft_model(student, config)
    set_peft_model_state_dict(model, load_file(folder / "untrained" / ADAPTER))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    found = []
    for _ in range(STEPS):
        batch = data.Collator(0)(blocks[:4])
        labels = batch.pop("labels")[:, 1:].flatten()
        learnt = labels != IGNORED
        ours = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)[learnt]
        with torch.no_grad():
            theirs = teacher(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)[learnt]
        ours, theirs = log_softmax(ours, -1), log_softmax(theirs, -1)
        ce = -ours.gather(1, labels[learnt].unsqueeze(1)).mean()
        kd = kl_div(ours, theirs, log_target=True, reduction="sum") / learnt.sum()
        loss = 0.5 * ce + 0.5 * kd
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, get_peft_model_state_dict(model)


@pytest.mark.parametrize("name", ["adapters", "adapters_sharded"])
def test_adapters_are_trained_as_plain_peft_trains_them(name, finished, sharded):
    folder, results = finished.folder, finished.results | sharded.results
    assert results[name] == results["untrained"] == [0, ""]
    expected_losses, expected = by_hand(folder)
    assert log(folder / name) == pytest.approx(expected_losses, rel=CLOSE)
    found, first = (load_file(folder / each / ADAPTER) for each in (name, "untrained"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert_close(found[key], value, 600, STEPS)
        assert not torch.equal(found[key], first[key])
    assert not list((folder / name).glob("model*.safetensors"))
    card = (folder / name / "README.md").read_text()
    assert f"base_model: {folder}/student" in card and "kd_alpha" in card


def test_a_merged_student_predicts_what_its_adapters_do(finished, sharded):
    assert sharded.results["merged"] == [0, ""]
    assert not (finished.folder / "merged" / "adapter_config.json").exists()
    whole = AutoModelForCausalLM.from_pretrained(finished.folder / "merged")
    assert whole.dtype == torch.float32
    adapted = AutoPeftModelForCausalLM.from_pretrained(finished.folder / "adapters")
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        ours, expected = whole(input_ids=ids).logits, adapted(input_ids=ids).logits
    assert_close(ours, expected, 600, STEPS)


def test_an_adapted_student_writes_and_matches_layers(sharded):
    assert sharded.results["writes"] == [0, ""]
    file = sharded.folder / "writes" / ADAPTER
    assert not [key for key in load_file(file) if "distillation" in key]


# -- runs that are interrupted


@pytest.mark.parametrize("kind", ["files", "streamed", "adapted", "sharded", "shared_stream"])
def test_the_same_command_goes_on_bit_for_bit(kind, finished, sharded):
    runs = sharded if kind.startswith("sha") else finished
    names = [f"{kind}_{part}" for part in ("whole", "half", "again")]
    assert [runs.results[name] for name in names] == [[0, ""]] * 3
    whole, again = runs.folder / names[0], runs.folder / names[2]
    # The first half has not logged its first step, so it was not trained again.
    assert 1 in log(whole, "step") and 1 not in log(again, "step")
    (file,) = (each.name for each in whole.glob("*model.safetensors"))
    ours, expected = load_file(again / file), load_file(whole / file)
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


def test_ranks_share_a_stream(finished, sharded):
    one, two = (log(sharded.folder / f"{name}_whole") for name in ("streamed", "shared_stream"))
    assert two == pytest.approx(one, rel=1e-5)


def test_sigterm_leaves_a_checkpoint(folder):
    output = folder / "preempted"
    endless = "--save_strategy steps --save_steps 100000 --max_steps 100000"
    options = f"{ALONE}student {TEXT} {endless} --per_device_train_batch_size 1"
    words = [sys.executable, str(REPOSITORY / "run_distill.py"), "--output_dir", str(output)]
    words += options.replace("{}", str(folder)).split()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        said = ""
        while process.stdout and "'loss'" not in said:
            line = process.stdout.readline()
            said += line
            assert line, said
        process.send_signal(signal.SIGTERM)
        said += process.communicate(timeout=120)[0]
    assert process.returncode == 128 + signal.SIGTERM, said
    (checkpoint,) = output.glob("checkpoint-*")
    assert f"SIGTERM: stopped after step {checkpoint.name.rpartition('-')[2]};" in said, said
