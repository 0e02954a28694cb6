"""Trainer runs for `benchmarks.faults`. The ranks are forks of this process, which has imported
transformers and zero.

A run is an ordinary script: model, Trainer, `train(resume_from_checkpoint=...)`. A rank with a
`Kill` ends itself by SIGKILL. The other ranks are then killed, as a launcher would do."""

from __future__ import annotations

import zero.hf

zero.hf.enable()  # before transformers is imported

# ruff: noqa: E402
import atexit
import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from zero.checkpoint import find_resumable

STEPS, EVERY, TIME_LIMIT = 8, 2, 240
# File operations that Python reports. The delay makes kills also hit writes inside of torch and
# safetensors.
_EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open")
_CALLS = ("pwrite", "fsync", "fdatasync")


@dataclass(frozen=True)
class Kill:
    """Kill rank `rank` `delay` seconds after its file operation number `operations`."""

    rank: int
    operations: int
    delay: float


@dataclass(frozen=True)
class Job:
    """`mode`: sync, async or nvme.

    `by`: resume by "flag", by "find_resumable" or by "path" (of the newest).
    """

    folder: Path
    ranks: int
    mode: str
    by: str
    limit: int | None

    @property
    def output(self) -> Path:
        return self.folder / "output"


@dataclass
class Ended:
    """`report`: losses, digest of the weights, file operations of each rank; None if the run was
    killed or failed. `killed`: the first rank that ended was the one with the `Kill`."""

    report: dict | None
    text: str
    killed: bool


def run(job: Job, kill: Kill | None = None, linger: float = 0.0) -> Ended:
    """Run a job. `linger`: seconds that the other ranks live after the kill."""
    job.folder.mkdir(parents=True, exist_ok=True)
    log, result = job.folder / "log", job.folder / "report.json"
    for path in (log, result):
        path.unlink(missing_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sys.stdout.flush()
    sys.stderr.flush()
    ranks, killed = {}, False
    for rank in range(job.ranks):
        if (pid := os.fork()) == 0:
            _become_rank(rank, job, kill, store.port, log, result)
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid, None)
        if linger >= 0 and kill is not None and rank == kill.rank:
            killed = os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        if rank is not None and status and ranks and linger >= 0:
            time.sleep(linger)
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            linger = -1.0  # ranks that end from now on were killed here
    report = json.loads(result.read_text()) if result.exists() else None
    return Ended(report, log.read_text(errors="replace"), killed)


def _become_rank(
    rank: int, job: Job, kill: Kill | None, port: int, log: Path, result: Path
) -> None:
    code = 1
    try:
        signal.alarm(TIME_LIMIT)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": job.ranks,
            "LOCAL_WORLD_SIZE": job.ranks,
        }
        variables |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        os.environ.update({name: str(value) for name, value in variables.items()})
        _train(job, kill if kill is not None and kill.rank == rank else None, rank, result)
        atexit._run_exitfuncs()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Operations(TrainerCallback):
    """Counts file operations in training, and ends the process at the one that `kill` names."""

    def __init__(self, kill: Kill | None):
        self.kill = kill
        self.count = 0
        self._counts = False
        sys.addaudithook(self._audit)
        for name in _CALLS:
            setattr(os, name, self._counted(getattr(os, name)))

    def on_train_begin(self, args, state, control, **kwargs):
        self._counts = True

    def _audit(self, event: str, arguments: tuple) -> None:
        if event in _EVENTS and (
            event != "open" or (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        ):
            self._one_more()

    def _counted(self, function):
        def call(*args, **kwargs):
            self._one_more()
            return function(*args, **kwargs)

        return call

    def _one_more(self) -> None:
        self.count += self._counts
        if self.kill is None or self.count != self.kill.operations:
            return
        if self.kill.delay:
            threading.Timer(self.kill.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)


class _Saved(TrainerCallback):
    """Records the saves that this rank has finished."""

    def __init__(self, path: Path):
        self.path = path

    def on_save(self, args, state, control, **kwargs):
        self.path.write_text(str(state.global_step))


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def _configuration(job: Job) -> dict:
    configuration = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "checkpoint": {"async_save": job.mode == "async"},
    }
    if job.mode == "nvme":
        place = {"device": "nvme", "nvme_path": str(job.folder)}
        configuration["zero_optimization"] |= {"offload_optimizer": place, "offload_param": place}
    return configuration


def _train(job: Job, kill: Kill | None, rank: int, result: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(job.output), max_steps=STEPS, save_steps=EVERY, logging_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=2, save_total_limit=job.limit, use_cpu=True, report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False, deepspeed=_configuration(job),
    )  # fmt: skip
    set_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=8, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    operations = _Operations(kill)
    trainer = Trainer(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=Samples(),
        callbacks=[operations, _Saved(job.folder / f"saved-{rank}")],
    )  # fmt: skip
    if job.by == "flag":  # as in transformers' example scripts
        resume = get_last_checkpoint(job.output) is not None if job.output.is_dir() else False
    elif job.by == "path":
        resume = job.output / f"checkpoint-{STEPS - EVERY}"
        resume = str(resume) if resume.is_dir() else None
    else:
        resume = find_resumable(job.output)
    newest = get_last_checkpoint(job.output) if resume is True else resume
    trainer.train(resume_from_checkpoint=resume)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(job.ranks)]
    dist.all_gather(counts, torch.tensor([operations.count]))
    if rank == 0:
        digest = hashlib.sha256()
        for name, value in sorted(weights.items()):
            digest.update(name.encode() + value.contiguous().numpy().tobytes())
        losses = {
            entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry
        }
        report = {
            "losses": losses,
            "weights": digest.hexdigest(),
            "operations": torch.cat(counts).tolist(),
        }
        report["from"] = int(Path(newest).name.split("-")[1]) if newest else 0
        result.write_text(json.dumps(report))


def same(found: dict, expected: dict) -> bool:
    """Compare all losses and the final weights bit for bit.

    If a run was complete before it was killed, the Trainer takes one more step, with learning rate
    0."""
    losses = {step: loss for step, loss in found["losses"].items() if int(step) <= STEPS}
    return losses == expected["losses"] and found["weights"] == expected["weights"]
