"""The time that a sharded student takes to write a batch (`--lmbda`), compared with transformers'
`generate` on the whole model.

    python -m benchmarks.applications.distill_generation

On one process and then on two, a Llama and a T5 continue prompts of different lengths. Each process
has the model twice: whole, and at stage 3. In each round all processes first call `generate` of
the whole model on prompts that are already padded, side by side, and then
`distill.on_policy.rewrite`, which gathers the student, writes, and makes a training batch. No model
has an end token, so both write equally many tokens. "ratio" is the median over the rounds, of the
slowest process."""

from __future__ import annotations

import copy
import statistics
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import zero
from benchmarks.measuring import timed
from benchmarks.runner import Parser, Row, finish, ranks, table
from distill.on_policy import rewrite
from zero.tools.arguments import count

GENERATE, REWRITE = "generate", "rewrite"
PAD = 0


def llama(args: Namespace) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocabulary, hidden_size=args.width, intermediate_size=3 * args.width,
            num_hidden_layers=args.layers, num_attention_heads=args.width // 64,
            bos_token_id=None, eos_token_id=None, pad_token_id=PAD,
        )
    )  # fmt: skip


def t5(args: Namespace) -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=args.vocabulary, d_model=args.width, d_ff=3 * args.width,
            num_layers=args.layers, num_heads=args.width // 64, d_kv=64,
            decoder_start_token_id=PAD, eos_token_id=None, pad_token_id=PAD,
        )
    )  # fmt: skip


MODELS = {"Llama": llama, "T5": t5}


def batch_of(rank: int, args: Namespace) -> dict[str, torch.Tensor]:
    """Return examples whose prompts have lengths from a quarter of `--length` up to all of it."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.linspace(args.length // 4, args.length, args.batch).long()
    place = torch.arange(args.length + 1)
    ids = torch.randint(3, args.vocabulary, (args.batch, args.length + 1), generator=generator)
    mask = place <= lengths[:, None]
    labels = torch.where(place == lengths[:, None], ids, -100)
    return {"input_ids": ids.where(mask, PAD), "attention_mask": mask.long(), "labels": labels}


Kinds = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


def writers(name: str, rank: int, args: Namespace) -> Kinds:
    """Return for the whole and for the sharded model what comes before a batch, which is not
    measured, and a function that writes it.
    """
    torch.manual_seed(0)
    whole = MODELS[name](args).eval()
    student = copy.deepcopy(whole)
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine, *_ = zero.initialize(
        model=student, model_parameters=student.parameters(), config=config
    )
    batch = batch_of(rank, args)
    prompts, mask = batch["input_ids"], batch["attention_mask"]
    if not whole.config.is_encoder_decoder:
        rows = [ids[: n - 1] for ids, n in zip(prompts, mask.sum(1).tolist(), strict=True)]
        prompts = pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side="left")
        mask = (prompts != PAD).long()
    options: dict[str, Any] = {"input_ids": prompts, "attention_mask": mask, "pad_token_id": PAD}
    options |= {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "use_cache": True}
    new = args.new_tokens
    return {
        GENERATE: (lambda: None, partial(whole.generate, **options, max_new_tokens=new)),
        # As after a step of training, nothing is gathered.
        REWRITE: (engine.reshard, partial(rewrite, student, batch, new, PAD, [], by_student=True)),
    }


def measure(**options: int) -> list[list[dict[str, dict[str, float]]]]:
    """On a rank: the seconds of each kind in each round, for each model."""
    dist.init_process_group("gloo")
    args, found = Namespace(**options), []
    for name in MODELS:
        kinds, rounds = writers(name, dist.get_rank(), args), []
        for _ in range(args.rounds + 1):
            rounds.append({})
            for kind, (prepare, write) in kinds.items():
                prepare()
                rounds[-1][kind] = timed(lambda write=write: write() is None)[0]
        found.append(rounds[1:])  # the first ones make caches
    return found


def row(name: str, found: list[list[dict[str, dict[str, float]]]], tokens: int) -> Row:
    """Return a line of the table. A round takes as long as its slowest process."""
    rounds = [
        {
            (kind, clock): max(rank[kind][clock] for rank in of_ranks)
            for kind in (GENERATE, REWRITE)
            for clock in ("cpu", "seconds")
        }
        for of_ranks in zip(*found, strict=True)
    ]
    result: Row = {"model": name, "processes": len(found)}
    for kind in (GENERATE, REWRITE):
        result[kind] = 1e3 * statistics.median(each[kind, "cpu"] for each in rounds) / tokens
    for clock in ("cpu", "seconds"):
        ratios = [each[REWRITE, clock] / each[GENERATE, clock] for each in rounds]
        result[f"ratio of {clock}"] = statistics.median(ratios)
    return result


def main() -> None:
    parser = Parser(__doc__)
    options = {
        "vocabulary": (32_000, ""),
        "width": (512, "a multiple of 64"),
        "layers": (4, "of the T5's encoder and of its decoder"),
        "batch": (8, "prompts"),
        "length": (64, "tokens of the longest prompt"),
        "new_tokens": (24, ""),
        "rounds": (5, ""),
    }
    for name, (default, text) in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=count, default=default, help=text)
    parser.add_output()
    args = parser.parse_args()
    rows = []
    for processes in (1, 2):
        found = ranks(measure, processes, **{name: getattr(args, name) for name in options})
        for name, *of_model in zip(MODELS, *found, strict=True):
            rows.append(row(name, of_model, args.batch * args.new_tokens))
    columns = {key: key for key in rows[0]}
    finish(args, table("CPU ms a token, and ratios to generate", columns, rows), rows=rows)


if __name__ == "__main__":
    main()
