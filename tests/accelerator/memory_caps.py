"""Random memory caps over eleven scripts, which must all end with the losses of an uncapped run:

    python -m tests.accelerator.memory_caps [--caps 200] [--seed 0] [SCRIPT ...]

A cap lies between what slices of one sample take and what the run takes, and applies from a random
step on; with several ranks to some of them, each with a cap of its own. The last two scripts
compute on the CPU, with their states offloaded, and the cap is one of addresses (`ulimit -v`),
between an eighth of those that a step takes and all of them. Each script has a line with its
largest relative difference of a loss and how often a step was repeated. The command exits with 1 if
the difference was more than the rounding of fp32, if a loss before the first cap has other bits, or
if a step was repeated more often than there are changes."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from trl import SFTConfig, SFTTrainer

from tests.accelerator import device
from tests.accelerator.test_adapt import ENOUGH, HOST, STEPS, Losses, listening, train
from tests.dist.monitor.test_host_memory import limited
from tests.dist.training import ds_config, relative, start, step
from tests.parity.models import ROWS, VOCABULARY, build
from tests.processes import fork_ranks, torchrun

# (number of ranks, kind, model, keys of zero_optimization, micro-batches of a step)
SCRIPTS: dict[str, tuple[int, str, str, dict, int]] = {
    "loop-t5-host": (1, "loop", "t5", HOST, 1),
    "loop-t5-stage1": (2, "loop", "t5", {"stage": 1}, 1),
    "loop-llama": (2, "loop", "llama", {}, 2),
    "loop-llama-stage2": (3, "loop", "llama", {"stage": 2}, 1),
    "loop-mixtral": (2, "loop", "mixtral", {}, 1),
    "trainer-t5": (2, "trainer", "t5", {"stage": 3, **HOST}, 2),
    "trainer-llama": (2, "trainer", "llama", {"stage": 3}, 2),
    "trainer-llama-one": (1, "trainer", "llama", {"stage": 3, **HOST}, 2),
    "trl-llama": (2, "trl", "llama", {"stage": 3}, 1),
    "host-llama": (1, "host", "llama", HOST, 1),
    "host-llama-two": (2, "host", "llama", HOST, 1),
}
SAMPLES = 8  # of a micro-batch of a Trainer
ON_HOST = 768  # samples of a micro-batch on the CPU
# A process may use no more addresses than those of its tensors: freed memory goes back to the
# system, and threads have no memory of their own, which malloc would use if an allocation fails.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_ARENA_MAX": "1"}
REPEATS = 6  # of a step: two other changes, and eight samples are halved three times


class Limits(TrainerCallback):
    def __init__(self, limits: list[int]):
        self.limits = limits

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        device.set_limit(self.limits[state.global_step])


def train_by_trainer(
    kind: str,
    name: str,
    section: dict,
    accumulation: int,
    act: str,
    limits: list[int],
    slices: int,
) -> tuple[Losses, int, list[str]]:
    """As `train`, by transformers' Trainer, or that of TRL."""
    if (jobs := str(Path(__file__).parents[1] / "hf" / "scripts")) not in sys.path:
        sys.path.append(jobs)
    jobs: Any = importlib.import_module("jobs")
    device.set_limit(ENOUGH)
    config = {
        "zero_optimization": section,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "on_out_of_memory": act,
        "activation_checkpointing": {"batch_slices": slices},
    }
    with tempfile.TemporaryDirectory() as folder, listening() as said:
        arguments: dict[str, Any] = {
            "output_dir": folder, "deepspeed": config, "max_steps": STEPS, "logging_steps": 1,
            "per_device_train_batch_size": 2 * SAMPLES // accumulation, "report_to": "none",
            "gradient_accumulation_steps": accumulation, "save_strategy": "no",
            "disable_tqdm": True,
        }  # fmt: skip
        callbacks = [Limits(limits)]
        if kind == "trl":
            trainer = sft_trainer(arguments, jobs.make_model(name), callbacks)
        else:
            trainer = Seq2SeqTrainer(
                jobs.make_model(name), Seq2SeqTrainingArguments(**arguments), jobs.collate,
                jobs.Tokens(200, name == "t5"), callbacks=callbacks,
            )  # fmt: skip
        torch.accelerator.reset_peak_memory_stats()
        trainer.train()
        most = torch.accelerator.max_memory_allocated()
        device.set_limit(ENOUGH)
        losses = [[each["loss"]] for each in trainer.state.log_history if "loss" in each]
        trainer.model_wrapped.destroy()
    return losses, most, said


def sft_trainer(arguments: dict[str, Any], model: Any, callbacks: list) -> Any:
    """TRL's trainer, with texts of unequal lengths."""
    words = Tokenizer(WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    generator = torch.Generator().manual_seed(11)
    lengths = [4 + number % 5 for number in range(200)]
    texts = [torch.randint(3, 64, (each,), generator=generator).tolist() for each in lengths]
    return SFTTrainer(
        model, SFTConfig(**arguments, bf16=False, gradient_checkpointing=False),
        train_dataset=Dataset.from_dict({"input_ids": texts}), processing_class=tokenizer,
        callbacks=callbacks,
    )  # fmt: skip


def train_on_host(
    name: str, section: dict, act: str, limits: list[int]
) -> tuple[Losses, int, list[str]]:
    """As `train`, on the CPU, with limits for the addresses that a step adds."""
    engine, _ = start(build(name), ds_config(**section) | {"on_out_of_memory": act})
    generator, losses, most = torch.Generator().manual_seed(11), [], 0
    with listening() as said:
        for nbytes in limits:
            ids = torch.randint(3, VOCABULARY, (ON_HOST, 9), generator=generator)
            with limited(nbytes) as peak:
                losses.append(step(engine, [{"input_ids": ids, "labels": ids}]))
            most = max(most, peak())
    engine.destroy()
    return losses, most, said


def capped(script: str, seed: int, count: int) -> list[tuple[bool, float, int]]:
    """For each cap: whether the losses before it have the usual bits, the largest difference, and
    how often a step was repeated at most.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _, kind, *given, accumulation = SCRIPTS[script]
    if kind != "host":
        use_device(rank)

    def run(act: str, limits: list[int], slices: int = 1) -> tuple[Losses, int, list[str]]:
        if kind == "host":
            return train_on_host(*given, act, limits)
        if kind == "loop":
            return train(*given, accumulation, act, limits, slices=slices)
        return train_by_trainer(kind, *given, accumulation, act, limits, slices)

    free = [ENOUGH] * STEPS
    usual, most, _ = run("explain", free)
    if kind == "host":
        least = most // 2
        run("adapt", [most // 2] * STEPS)  # what it imports for that, and remembers
    else:
        least = run("adapt", free, max(ROWS, SAMPLES))[1]
    draw, found = random.Random(seed), []
    for _ in range(count):
        first = draw.randrange(STEPS)
        caps = [
            draw.uniform(0.1, 1) if world == 1 or draw.random() < 0.6 else None
            for _ in range(world)
        ]
        part = caps[rank]
        cap = ENOUGH if part is None else least + int(part * (most - least))
        limits = [ENOUGH] * first + [cap] * (STEPS - first)
        losses, _, said = run("adapt", limits)
        worst = max(relative(*pair) for pair in zip(losses, usual, strict=True))
        of_steps = Counter(text.partition(":")[0] for text in said)
        repeats = max(of_steps.values(), default=0)
        if repeats > REPEATS:
            print(script, limits, *said, sep="\n", file=sys.stderr)
        found.append((losses[:first] == usual[:first], worst, repeats))
    return found


def use_device(rank: int) -> None:
    device.register()
    index = rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{device.NAME}:{index}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(SCRIPTS)}")
    parser.add_argument("--caps", type=int, default=200, help="of all scripts together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    scripts = options.scripts or list(SCRIPTS)
    failed, count = False, max(1, options.caps // len(scripts))
    for script in scripts:
        with tempfile.TemporaryDirectory() as folder:
            given, ranks = [script, str(options.seed), str(count), folder], SCRIPTS[script][0]
            # A forked process has free memory of its parent, which would be used first.
            timeout = 300 + 60 * count
            if SCRIPTS[script][1] == "host":
                done = torchrun(__file__, *given, nproc=ranks, timeout=timeout, env=MALLOC)
            else:
                done = fork_ranks(__file__, *given, nproc=ranks, timeout=timeout)
            if done.returncode:
                print(f"{script}: FAILED\n{done.stderr[-4000:]}", flush=True)
                failed = True
                continue
            files = sorted(Path(folder).iterdir())
            ranks = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        found = [each for rank in ranks for each in rank]
        worst, repeats = max(each[1] for each in found), [each[2] for each in ranks[0]]
        is_right = all(same for same, _, _ in found) and worst < 1e-6 and max(repeats) <= REPEATS
        failed |= not is_right
        repeated = ", ".join(f"{n} x {repeats.count(n)}" for n in sorted(set(repeats)))
        print(
            f"{script}: {count} caps, losses differ by {worst:.1e} at most, repeated {repeated}"
            f"{'' if is_right else f' FAILED{chr(10)}{done.stderr[-4000:]}'}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    if "RANK" in os.environ:
        script, seed, count, folder = sys.argv[1:]
        found = capped(script, int(seed), int(count))
        if SCRIPTS[script][1] != "host":
            torch.accelerator.synchronize()
            assert (mistakes := device.mistakes()) == [], mistakes
        report = Path(folder, f"{os.environ['RANK']}.json")
        report.write_text(json.dumps(found), encoding="utf-8")
    else:
        sys.exit(main())
