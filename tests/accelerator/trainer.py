"""The jobs of `tests/hf/scripts/jobs.py`, an ordinary Trainer script, on the simulated accelerator."""

import os
import sys
from pathlib import Path

import torch

from tests.accelerator import device

LOCAL_RANK = int(os.environ["LOCAL_RANK"])

if __name__ == "__main__":
    device.register()
    torch.accelerator.set_device_index(LOCAL_RANK)
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{device.NAME}:{LOCAL_RANK}"
    sys.path.insert(0, str(Path(__file__).parents[1] / "hf" / "scripts"))
    import jobs

    jobs.main()
    torch.accelerator.synchronize()
    assert device.mistakes() == []
    assert torch.accelerator.max_memory_allocated() > 0 == torch.accelerator.max_memory_allocated(1 - LOCAL_RANK)
