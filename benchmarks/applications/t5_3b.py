"""Trains T5-3B (random weights) with run_translation.py and offload: to host memory with a GPU, to
files without one.

    python -m benchmarks.applications.t5_3b --folder FAST_DISK [--steps 1] [--device nvme] [--small]

Run it by hand: without a GPU, a step takes several minutes and 60 GB of disk space. Peak resident
memory is sampled over all processes of the job. The job's own output (progress, seconds by phase)
is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
from transformers import T5Config

from benchmarks.models import MODELS, t5
from benchmarks.runner import REPOSITORY, Parser, Table, finish
from translation.tokenizer import scored_pieces, t5_tokenizer, train_sentencepiece
from zero.tools.arguments import count

GIB = 1 << 30


def shape(small: bool) -> T5Config:
    """Return the published shape of t5-3b, 2.85 billion parameters. `small`: one of 16 million."""
    return t5(256, 1024, 4, 4) if small else MODELS["t5-3b"]()


def ds_config(device: str, folder: Path) -> dict:
    tier = {"device": device, "nvme_path": str(folder)}
    return {
        # Most CPUs have no instructions for bf16. On them fp32 is ten times as fast.
        "bf16": {"enabled": torch.cuda.is_available()},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 50_000_000,
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_max_live_parameters": 200_000_000,
            "stage3_prefetch_bucket_size": 100_000_000,
            "offload_param": {**tier, "max_in_cpu": 0},
            "offload_optimizer": {**tier, "pipeline_read": True, "pipeline_write": True},
        },
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "wall_clock_breakdown": True,
    }


def prepare(work: Path, arguments: argparse.Namespace) -> list[str]:
    """Write configuration, tokenizer and text to `work`. Return the command."""
    config = shape(arguments.small)
    config.save_pretrained(work / "model")
    lines = [
        f"sentence number {i} speaks of {i * i} things and of {i + 7} more" for i in range(400)
    ]
    t5_tokenizer(scored_pieces(train_sentencepiece(lines, 300, 1.0))).save_pretrained(
        work / "model"
    )
    # Long enough to be cut to 128 tokens on both sides.
    records = [
        {"translation": {"en": " ".join(lines[i : i + 40]), "de": " ".join(lines[i : i + 40])}}
        for i in range(99)
    ]
    (work / "text.json").write_text("\n".join(json.dumps(record) for record in records))
    (work / "ds_config.json").write_text(json.dumps(ds_config(arguments.device, arguments.folder)))
    options = {
        "config_name": work / "model",
        "tokenizer_name": work / "model",
        "train_file": work / "text.json",
        "source_lang": "en",
        "target_lang": "de",
        "output_dir": work / "out",
        "deepspeed": work / "ds_config.json",
        "max_source_length": 128,
        "max_target_length": 128,
        "per_device_train_batch_size": 1,
        "max_steps": arguments.steps,
        "save_strategy": "no",
        "logging_steps": 1,
        "bf16": torch.cuda.is_available(),
        "do_train": True,
        "report_to": "none",
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [sys.executable, str(REPOSITORY / "run_translation.py"), *flags]


class Sampler:
    """A thread that samples the resident memory of a process and its children."""

    def __init__(self, process: psutil.Process):
        self.process = process
        self.peak = 0
        self.peak_anonymous = 0
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.2):
            try:
                family = [self.process, *self.process.children(recursive=True)]
                infos = [each.memory_info() for each in family]
                self.peak = max(self.peak, sum(info.rss for info in infos))
                self.peak_anonymous = max(
                    self.peak_anonymous, sum(info.rss - info.shared for info in infos)
                )
            except psutil.NoSuchProcess:
                continue

    def stop(self) -> None:
        self._ended.set()
        self.thread.join()


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the offload files")
    parser.add_argument("--steps", type=count, default=1)
    parser.add_argument(
        "--device", choices=["nvme", "cpu"], default="cpu" if torch.cuda.is_available() else "nvme"
    )
    parser.add_argument(
        "--small", action="store_true", help="a model of 16 million parameters, to try the command"
    )
    parser.add_output()
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as work:
        command = prepare(Path(work), arguments)
        before, start = psutil.disk_io_counters(), time.perf_counter()
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
        sampler = Sampler(psutil.Process(process.pid))
        code = process.wait()
        sampler.stop()
        seconds, after = time.perf_counter() - start, psutil.disk_io_counters()
        metrics = Path(work) / "out" / "train_results.json"
        trained = json.loads(metrics.read_text()) if metrics.exists() else {}
    rows = [
        ["model", "a small T5" if arguments.small else "T5-3B"],
        ["seconds of the whole job", seconds],
        ["seconds of training", trained.get("train_runtime")],
        ["loss", trained.get("train_loss")],
        ["peak resident GiB", sampler.peak / GIB],
        ["peak GiB without pages of files", sampler.peak_anonymous / GIB],
        ["GiB read from disks", (after.read_bytes - before.read_bytes) / GIB],
        ["GiB written to disks", (after.write_bytes - before.write_bytes) / GIB],
    ]
    caption = f"run_translation.py with state on {arguments.device}, batch 1"
    finish(arguments, Table(caption, ["figure", "value"], rows))
    sys.exit(code)


if __name__ == "__main__":
    main()
