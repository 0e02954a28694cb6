"""Distils for some steps of SGD, once for each job in a JSON file, and writes a report.

    torchrun --nproc_per_node 2 steps.py jobs.json

A job: {"kind": llama|gpt2|t5, "arguments": DistillationConfig's, "pad": multiple, "report":
file}. The report holds the log, the held-out metrics, and the trained student's weights. With SGD
the weights show the gradients."""
# ruff: noqa: E402

import zero.hf

zero.hf.enable()

import json
import sys
from pathlib import Path

from distill.config import DistillationConfig
from distill.trainer import DistillationTrainer
from tests.distill import models

DEFAULTS = {
    "max_steps": 2, "logging_steps": 1, "learning_rate": 0.01, "lr_scheduler_type": "constant",
    "optim": "sgd", "max_grad_norm": 0.0, "save_strategy": "no", "report_to": "none",
    "disable_tqdm": True, "use_cpu": True,
}  # fmt: skip


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        make = getattr(models, job["kind"])
        data = models.pairs(12) if job["kind"] == "t5" else models.sequences(12)
        args = DistillationConfig(
            output_dir=job["report"] + ".out", **(DEFAULTS | job["arguments"])
        )
        student, teacher = make(16, 2, seed=1), make(32, 3, seed=2)
        trainer = DistillationTrainer(
            student, teacher, args, train_dataset=data, eval_dataset=data[:7],
            data_collator=models.Pad(job.get("pad", 1)),
        )  # fmt: skip
        trainer.train()
        evaluation = trainer.evaluate()
        trainer.save_model()
        engine = trainer.teacher.engine
        residency, groups = getattr(engine, "residency", None), getattr(engine, "groups", [])
        report = {
            "engine": type(trainer.model_wrapped).__name__,
            "teacher": type(engine).__name__,
            "peak": None if residency is None else residency.peak,
            "groups": sorted(each.layout.numel for each in groups if not each.persistent),
            "log": trainer.state.log_history,
            "evaluation": evaluation,
        }
        if args.process_index == 0:
            Path(job["report"]).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
