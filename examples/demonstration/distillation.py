"""`run_distill.py` without arguments: an offline demonstration on the source of Python's standard
library.

A small teacher is trained, and kept for later runs. Then two identical students are trained on the
same data for the same number of steps, one from the text alone, and the other from the teacher as
well."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.integrations import is_deepspeed_zero3_enabled

from distill import data, export
from distill.config import DistillationConfig
from distill.corpus import train_tokenizer
from distill.on_policy import generate
from distill.options import DataArguments
from distill.student import from_config
from distill.teacher import load_model
from distill.trainer import DistillationTrainer
from examples.demonstration import report
from examples.demonstration.defaults import TEACHER_STEPS
from examples.demonstration.report import Result
from examples.demonstration.standard_library import standard_library
from translation.arguments import output_folder
from translation.report import convert
from translation.tokenizer import pad_token_id, token_id

logger = logging.getLogger(__name__)

VOCABULARY = 1024
TEACHER: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 344,
}
STUDENT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 172,
}
TEACHER_SEED = 0
WITHOUT_TEACHER: dict[str, Any] = {
    "kd_alpha": 0.0,
    "hidden_loss_weight": 0.0,
    "attn_relation_weight": 0.0,
    "layer_mapping": None,
    "lmbda": 0.0,
    "seq_kd": False,
}
PROMPT = "def __init__(self, name, value=None):\n    "

Blocks = list[dict[str, list[int]]]


def run(data_args: DataArguments, args: DistillationConfig) -> None:
    """Train teacher and students. Write models, table, plot and report to `args.output_dir`."""
    folder = Path(output_folder(args))
    tokenizer, train, held_out = _prepare(folder, data_args, args)
    of_teacher = train
    if data_args.max_train_tokens:
        train = train[: max(1, data_args.max_train_tokens // args.max_length)]
    if args.max_steps <= 0:
        batches = math.ceil(len(train) / (args.train_batch_size * args.world_size))
        epoch = math.ceil(batches / args.gradient_accumulation_steps)
        args = replace(args, max_steps=math.ceil(args.num_train_epochs * epoch))
    steps = data_args.teacher_steps or min(TEACHER_STEPS, args.max_steps)
    _say(args, f"a teacher of {steps} steps, then two students of {args.max_steps} steps each")
    teacher_folder, teacher_result = _teacher(
        folder, tokenizer, of_teacher, held_out, steps, data_args, args
    )
    _say(
        args,
        f"students learn from {len(train) * args.max_length:,} tokens; {len(held_out)} blocks "
        "are held out",
    )
    results, completions = {"teacher": teacher_result}, {}
    teacher = load_model(str(teacher_folder))
    completions["teacher"] = None
    how = {"baseline": "by cross-entropy only", "distilled": "with its teacher"}
    for name, settings in {"baseline": WITHOUT_TEACHER, "distilled": {}}.items():
        set_seed(args.seed)
        _say(args, f"training the student {how[name]}")
        own = replace(args, output_dir=str(folder / name), **settings)
        student = from_config(_config(tokenizer, args, STUDENT))
        results[name], trainer = _train(student, teacher, tokenizer, train, held_out, own)
        completions[name] = _complete(trainer.model, tokenizer, args)
        if completions["teacher"] is None:
            completions["teacher"] = _complete(teacher, tokenizer, args)
        trainer.save_model()
        if name == "baseline":
            results["baseline_best"] = _best(results[name])
    if args.process_index == 0:
        _write(folder, results, completions, data_args, args)


def _write(folder: Path, results: dict[str, Result], completions, data_args, args) -> None:
    convert(folder / "distilled", data_args.export_dtype)
    figures = {
        name: getattr(results["distilled"], name)
        for name in ("eval_loss", "eval_ppl", "top1_agreement")
    }
    corpus = "the source of the Python standard library"
    export.write_card(folder / "distilled", args, "the demonstration's teacher", figures, corpus)
    order = ("teacher", "baseline", "baseline_best", "distilled")
    ordered = {name: results[name] for name in order}
    notes = [
        f"loss {args.loss_type}, kd_alpha {args.kd_alpha:g}, T {args.temperature:g}, "
        f"{args.hidden_loss_type} loss on hidden states with weight {args.hidden_loss_weight:g}, "
        f"seed {args.seed}",
        f"{args.max_steps} steps of {args.train_batch_size * args.world_size} blocks of "
        f"{args.max_length} tokens",
    ]
    text = report.write(
        str(folder), ordered, PROMPT, {name: completions[name] for name in completions}, notes
    )
    print(f"\n{text}\n")
    for name in ("teacher", "baseline", "distilled"):
        print(f"--- completion by the {name}\n{completions[name]}")
    print(
        f"\nreport: {folder / 'report.md'}, {folder / 'report.json'}, "
        f"{folder / 'held_out_loss.png'}"
    )
    print(f"student: {folder / 'distilled'} ({data_args.export_dtype})")


# -- corpus


def _prepare(
    folder: Path, data_args: DataArguments, args: DistillationConfig
) -> tuple[PreTrainedTokenizerBase, Blocks, Blocks]:
    """Return tokenizer, training blocks and held-out blocks. Only rank 0 trains the tokenizer."""
    corpus = standard_library()
    digest = hashlib.sha256("".join(corpus.train).encode()).hexdigest()[:12]
    where = folder / f"tokenizer-{digest}-{VOCABULARY}"
    with args.main_process_first(desc="training the tokenizer"):
        if not where.is_dir():
            _say(args, f"training a tokenizer on {len(corpus.train)} files")
            partial = where.with_suffix(".partial")
            train_tokenizer(corpus.train, VOCABULARY).save_pretrained(partial)
            partial.rename(where)
    tokenizer = AutoTokenizer.from_pretrained(where)
    blocks = []
    for texts in corpus:
        encoded = (data.encode([data.Segment(text, True)], tokenizer) for text in texts)
        blocks.append([*data.pack(encoded, args.max_length, pad_token_id(tokenizer))])
    train, held_out = blocks
    # Take blocks from all held-out files.
    step = max(1, len(held_out) // (data_args.max_eval_samples or len(held_out)))
    held_out = held_out[::step][: data_args.max_eval_samples]
    return tokenizer, train, held_out


def _config(
    tokenizer: PreTrainedTokenizerBase, args: DistillationConfig, sizes: dict[str, Any]
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=max(256, args.max_length),
        tie_word_embeddings=True,
        pad_token_id=pad_token_id(tokenizer),
        bos_token_id=token_id(tokenizer, "bos"),
        eos_token_id=token_id(tokenizer, "eos"),
        **sizes,
    )


# -- models


def _teacher(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    train: Blocks,
    held_out: Blocks,
    steps: int,
    data_args,
    args,
) -> tuple[Path, Result]:
    """Return the folder and figures of a trained teacher: of an earlier run with the same settings,
    or a new one.
    """
    settings = {
        **TEACHER,
        "steps": steps,
        "length": args.max_length,
        "learning_rate": args.learning_rate,
        "batch": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "blocks": [len(train), len(held_out)],
        "vocabulary": hashlib.sha256(
            json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()
        ).hexdigest(),
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    where = folder / f"teacher-{digest}"
    done = [where.joinpath("result.json").is_file()]
    if args.world_size > 1:
        broadcast_object_list(done)
    if done[0]:
        _say(args, f"the teacher is in {where} already")
        return where, Result(
            **json.loads(where.joinpath("result.json").read_text(encoding="utf-8"))
        )
    _say(args, f"training the teacher for {steps} steps")
    set_seed(TEACHER_SEED)
    own = replace(
        args, output_dir=str(where), max_steps=steps, eval_strategy="no",
        **WITHOUT_TEACHER,
    )  # fmt: skip
    model = from_config(_config(tokenizer, args, TEACHER))
    result, trainer = _train(model, None, tokenizer, train, held_out, own)
    trainer.save_model()
    if args.process_index == 0:
        where.joinpath("result.json").write_text(json.dumps(vars(result)), encoding="utf-8")
    args.distributed_state.wait_for_everyone()
    return where, result


def _train(
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    train: Blocks,
    held_out: Blocks,
    args: DistillationConfig,
) -> tuple[Result, DistillationTrainer]:
    parameters = model.num_parameters()  # the trainer adds projections, which are not exported
    trainer = DistillationTrainer(
        model, teacher, args, train_dataset=train, eval_dataset=held_out,
        processing_class=tokenizer, data_collator=data.Collator(pad_token_id(tokenizer)),
    )  # fmt: skip
    output = trainer.train()
    metrics = trainer.evaluate()
    trained = (
        trainer.args.train_batch_size
        * trainer.args.gradient_accumulation_steps
        * trainer.args.world_size
    )
    curve = {
        int(entry["step"]): entry["eval_loss"]
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    }
    seconds = output.metrics["train_runtime"] - trainer.seconds_evaluating
    length = len(train[0]["input_ids"])
    result = Result(
        eval_loss=metrics["eval_loss"],
        eval_ppl=metrics["eval_ppl"],
        parameters=parameters,
        tokens_per_second=trained * trainer.state.global_step * length / seconds,
        top1_agreement=metrics.get("eval_top1_agreement"),
        step=trainer.state.global_step,
        curve=sorted(curve.items()),
    )
    return result, trainer


def _best(last: Result) -> Result:
    """Return what early stopping would have kept: the evaluation with the smallest held-out
    loss.
    """
    step, loss = min(last.curve, key=lambda point: point[1])
    return replace(
        last,
        eval_loss=loss,
        eval_ppl=float(torch.tensor(loss).exp()),
        step=step,
        top1_agreement=None,
    )


@torch.no_grad()
def _complete(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: DistillationConfig
) -> str:
    """Return the model's greedy completion of `PROMPT`.

    All ranks call this, because parameters may be sharded.
    """
    model.eval()
    ids = tokenizer(PROMPT, return_tensors="pt").to(args.device)
    sharded = is_deepspeed_zero3_enabled() and args.world_size > 1
    written = generate(
        model, input_ids=ids["input_ids"], attention_mask=ids["attention_mask"], max_new_tokens=48,
        do_sample=False,
        synced_gpus=sharded, repetition_penalty=1.2,
    )  # fmt: skip
    return str(tokenizer.decode(written[0], skip_special_tokens=True))


def _say(args: DistillationConfig, text: str) -> None:
    if args.process_index == 0:
        logger.info(text)
