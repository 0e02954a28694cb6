"""Runs the Trainer script of the other tests on the simulated accelerator:

`trainer.py JOBS [PART CAPPED]`. With PART, `CAPPED` runs after `JOBS`, with this part of
the memory that they took.
"""

import gc
import importlib
import os
import sys
from pathlib import Path

import torch

from tests.accelerator import device

LOCAL_RANK = int(os.environ["LOCAL_RANK"])

if __name__ == "__main__":
    device.register()
    torch.accelerator.set_device_index(LOCAL_RANK)
    sys.path.append(str(Path(__file__).parents[1] / "hf" / "scripts"))
    script = importlib.import_module("jobs")
    capped = sys.argv[2:]
    script.main()
    if capped:
        gc.collect()
        device.set_limit(int(float(capped[0]) * torch.accelerator.max_memory_allocated()))
        sys.argv[1:] = capped[1:]
        script.main()
    torch.accelerator.synchronize()
    assert (found := device.mistakes()) == [], found
    assert (
        torch.accelerator.max_memory_allocated()
        > 0
        == torch.accelerator.max_memory_allocated(1 - LOCAL_RANK)
    )
