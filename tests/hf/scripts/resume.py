"""Trainer runs that save and resume, for `test_resume.py`. Only `sigterm_at` needs anything of
zero.

`python resume.py JOBS.json` runs each job in turn. Rank 0 writes the log to the job's `report`
file. A job:

    text        path of the JSON lines to train on: {"translation": {"en": ..., "de": ...}}
    dropout     of the model, a small T5 that reads and writes bytes
    arguments   keyword arguments of `Seq2SeqTrainingArguments`
    resume      optional: the Trainer's folder to resume from, or true for the last one in the
                output folder
    kill_at     optional: rank 1 is killed at the end of that step
    sigterm_at  optional: the launcher gets SIGTERM while that step begins; the Trainer has a
                `SaveOnSigterm`
    report      path of the JSON file to write
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from jobs import collate
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    set_seed,
)

SAMPLES = 48  # eight steps of six samples each: an epoch ends between the save and the end
SOURCE_BYTES, TARGET_BYTES = 48, 16


def read_samples(path: str) -> list[dict[str, list[int]]]:
    """Read samples with bytes as tokens.

    All targets have one length, so a mean over ranks is a mean over tokens.
    """
    samples = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            pair = json.loads(line)["translation"]
            source, target = (
                [byte + 1 for byte in pair[language].encode()] for language in ("en", "de")
            )
            if len(target) >= TARGET_BYTES and len(samples) < SAMPLES:
                source = source[:SOURCE_BYTES]
                samples.append(
                    {
                        "input_ids": source,
                        "attention_mask": [1] * len(source),
                        "labels": target[:TARGET_BYTES],
                    }
                )
    return samples


class KillRankOne(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)


class TerminateLauncher(TrainerCallback):
    """Sends SIGTERM to the launcher, as a scheduler does.

    The step waits until this rank has got the signal too.
    """

    def __init__(self, step: int, trainer: Seq2SeqTrainer):
        from zero.integrations.hf.preemption import SaveOnSigterm

        self.step = step
        self.answer = SaveOnSigterm()
        trainer.add_callback(self.answer)
        trainer.add_callback(self)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step and os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGTERM)
            while not self.answer.watch.received:
                time.sleep(0.01)


def run(job: dict) -> None:
    # Arguments before the model: they tell transformers to build it sharded.
    args = Seq2SeqTrainingArguments(
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False, **job["arguments"]
    )
    set_seed(0 if "resume" not in job else 1)
    config = T5Config(
        vocab_size=257, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        dropout_rate=job["dropout"],
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    set_seed(args.seed)
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=read_samples(job["text"]),
        data_collator=collate,
        callbacks=[KillRankOne(job["kill_at"])] if "kill_at" in job else None,
    )
    if "sigterm_at" in job:
        TerminateLauncher(job["sigterm_at"], trainer)
    # The Trainer believes that a model with **kwargs divides its loss by the number of target
    # tokens. T5 does not.
    trainer.model_accepts_loss_kwargs = False
    trainer.train(resume_from_checkpoint=job.get("resume"))
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if args.process_index == 0:
        sums = {name: value.double().sum().item() for name, value in state.items()}
        report = {"log": trainer.state.log_history, "sums": sums, "random": torch.rand(1).item()}
        Path(job["report"]).write_text(json.dumps(report), encoding="utf-8")


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run(job)


if __name__ == "__main__":
    main()
