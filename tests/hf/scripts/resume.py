"""Trainer runs that save and resume, for `test_resume.py`. An ordinary script, but for `sigterm_at`: no word of zero.

`python resume.py JOBS.json` runs each job in turn and writes its log to the job's `report` file from rank 0. A job:

    dropout     of the model, a small T5
    arguments   keyword arguments of `Seq2SeqTrainingArguments`
    resume      optional: the Trainer's folder to resume from, or true for the last one in the output folder
    kill_at     optional: rank 1 is killed at the end of that step
    sigterm_at  optional: the launcher gets SIGTERM while that step begins; a `SaveOnSigterm` of zero's is there
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
from jobs import Tokens, collate
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    set_seed,
)

SAMPLES = 30  # five steps of six samples each


class KillRankOne(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)


class TerminateLauncher(TrainerCallback):
    """As a scheduler does; this step goes on when the launcher has passed the signal on to this rank."""

    def __init__(self, step: int, trainer: Seq2SeqTrainer):
        from zero.hf.preemption import SaveOnSigterm

        self.step, self.answer = step, SaveOnSigterm()
        trainer.add_callback(self.answer)
        trainer.add_callback(self)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step and os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGTERM)
            while not self.answer.watch.received:
                time.sleep(0.01)


def run(job: dict) -> None:
    # The arguments come first: they tell transformers to build the model sharded.
    args = Seq2SeqTrainingArguments(report_to=[], disable_tqdm=True, dataloader_pin_memory=False, **job["arguments"])
    set_seed(0 if "resume" not in job else 1)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=job["dropout"],
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    set_seed(args.seed)
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=Tokens(SAMPLES, True),
        data_collator=collate,
        callbacks=[KillRankOne(job["kill_at"])] if "kill_at" in job else None,
    )
    if "sigterm_at" in job:
        TerminateLauncher(job["sigterm_at"], trainer)
    # T5 does not normalise its loss by the number of target tokens, as the Trainer believes of every **kwargs model.
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
