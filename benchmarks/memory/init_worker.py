"""One rank of `benchmarks.memory.init`: builds the model as a Trainer script with ZeRO-3 does, and
reports its memory.
"""

from __future__ import annotations

import resource
import sys
import time

import psutil

import zero.hf

zero.hf.enable()  # before transformers is imported

import torch.distributed as dist  # noqa: E402
from transformers import AutoModelForSeq2SeqLM  # noqa: E402
from transformers.integrations import HfDeepSpeedConfig  # noqa: E402

import zero  # noqa: E402
from benchmarks.launch import report  # noqa: E402
from benchmarks.models import T5_1B, t5_config  # noqa: E402


def main() -> None:
    zero.comm.init_distributed(dist_backend="gloo")
    imported = psutil.Process().memory_info().rss
    start = time.perf_counter()
    # transformers builds models inside zero.Init while this object is alive.
    ds_config = HfDeepSpeedConfig(
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    )
    model = AutoModelForSeq2SeqLM.from_config(t5_config(T5_1B))
    seconds = time.perf_counter() - start
    del ds_config
    report(
        {
            "parameters": model.num_parameters(),
            "bytes_per_parameter": next(model.parameters()).element_size(),
            "seconds": seconds,
            "rss_imported": imported,
            "rss_built": psutil.Process().memory_info().rss,
            # kilobytes on Linux, bytes on macOS
            "rss_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            * (1 if sys.platform == "darwin" else 1024),
        }
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
