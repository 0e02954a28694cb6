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

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import zero
from benchmarks.arguments import Parser, result_file
from benchmarks.launch import REPOSITORY
from distill.on_policy import rewrite
from zero.tools.arguments import count

Seconds = dict[str, list[float]]
GENERATE, REWRITE = "generate", "rewrite"
PAD = 0


def llama(args: argparse.Namespace) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocabulary, hidden_size=args.width, intermediate_size=3 * args.width,
            num_hidden_layers=args.layers, num_attention_heads=args.width // 64,
            bos_token_id=None, eos_token_id=None, pad_token_id=PAD,
        )
    )  # fmt: skip


def t5(args: argparse.Namespace) -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=args.vocabulary, d_model=args.width, d_ff=3 * args.width,
            num_layers=args.layers, num_heads=args.width // 64, d_kv=64,
            decoder_start_token_id=PAD, eos_token_id=None, pad_token_id=PAD,
        )
    )  # fmt: skip


MODELS = {"Llama": llama, "T5": t5}


def batch_of(rank: int, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return examples whose prompts have lengths from a quarter of `--length` up to all of it."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.linspace(args.length // 4, args.length, args.batch).long()
    place = torch.arange(args.length + 1)
    ids = torch.randint(3, args.vocabulary, (args.batch, args.length + 1), generator=generator)
    mask = place <= lengths[:, None]
    labels = torch.where(place == lengths[:, None], ids, -100)
    return {"input_ids": ids.where(mask, PAD), "attention_mask": mask.long(), "labels": labels}


Kinds = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


def writers(name: str, rank: int, args: argparse.Namespace) -> Kinds:
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


def measure(rank: int, world_size: int, args: argparse.Namespace, folder: str) -> None:
    """Write the seconds of each round to a file of this rank."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    group = f"file://{folder}/group{world_size}"
    dist.init_process_group("gloo", init_method=group, rank=rank, world_size=world_size)
    found: dict[str, dict[str, Seconds]] = {}
    for name in MODELS:
        kinds = writers(name, rank, args)
        found[name] = {kind: {"cpu": [], "wall": []} for kind in kinds}
        for number in range(args.rounds + 1):
            for kind, (prepare, write) in kinds.items():
                prepare()
                dist.barrier()
                start = time.process_time(), time.perf_counter()
                write()
                if number:  # the first ones make caches
                    found[name][kind]["cpu"].append(time.process_time() - start[0])
                    found[name][kind]["wall"].append(time.perf_counter() - start[1])
    Path(folder, f"{world_size}_{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def row(name: str, ranks: list[dict[str, dict[str, Seconds]]], tokens: int) -> str:
    """Return a line of the table. A round takes as long as its slowest process."""
    rounds = {}
    for kind in (GENERATE, REWRITE):
        for clock in ("cpu", "wall"):
            by_rank = [rank[name][kind][clock] for rank in ranks]
            rounds[kind, clock] = [max(each) for each in zip(*by_rank, strict=True)]
    ms = [1e3 * statistics.median(rounds[kind, "cpu"]) / tokens for kind in (GENERATE, REWRITE)]
    ratios = [
        statistics.median(
            own / plain
            for own, plain in zip(rounds[REWRITE, clock], rounds[GENERATE, clock], strict=True)
        )
        for clock in ("cpu", "wall")
    ]
    cells = [name, str(len(ranks)), *(f"{each:.2f}" for each in (*ms, *ratios))]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--vocabulary", type=count, default=32_000)
    add("--width", type=count, default=512, help="a multiple of 64")
    add("--layers", type=count, default=4, help="of the T5's encoder and of its decoder")
    add("--batch", type=count, default=8, help="prompts")
    add("--length", type=count, default=64, help="tokens of the longest prompt")
    add("--new-tokens", type=count, default=24)
    add("--rounds", type=count, default=5)
    output = REPOSITORY / "benchmarks" / "out" / "distill_generation.json"
    add("--output", type=result_file, default=output)
    args = parser.parse_args()
    lines, found = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for world_size in (1, 2):
            job = (world_size, args, folder)
            multiprocessing.start_processes(measure, job, world_size, start_method="fork")
            files = [Path(folder, f"{world_size}_{rank}.json") for rank in range(world_size)]
            found[world_size] = [json.loads(file.read_text()) for file in files]
            tokens = args.batch * args.new_tokens
            lines += [row(name, found[world_size], tokens) for name in MODELS]
    print("| model | processes | generate, CPU ms a token | rewrite | ratio | ratio of wall time |")
    print("|---|---|---|---|---|---|")
    print("\n".join(lines))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(found, indent=2))
    print(f"\nwritten: {args.output}")


if __name__ == "__main__":
    main()
