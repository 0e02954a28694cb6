"""What crosses the border between two groups of ranks in one step: plain stage 3, MiCS and hpZ.

    torchrun --nproc_per_node 4 examples/hybrid_sharding.py

Ranks 0 and 1 stand for one machine, ranks 2 and 3 for another. Everything is made here, nothing is
downloaded."""

import os
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # for a checkout that is not installed
import zero
from zero.comm.traffic import BETWEEN, MOVED

GROUP, WIDTH, ROWS, STEPS = 2, 64, 8, 3
# torchrun sets this to the number of processes on a machine.
os.environ["LOCAL_WORLD_SIZE"] = str(GROUP)
WAYS = {
    "stage 3": {},
    "MiCS": {"mics_shard_size": GROUP},
    "hpZ": {"zero_hpz_partition_size": GROUP},
}


def train(section: dict[str, int]) -> tuple[float, int, int]:
    """(the last loss, elements of this rank's shards, bytes that its last step sent to the other
    group).
    """
    stage3 = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": stage3 | section,
    }
    torch.manual_seed(0)
    with zero.Init(config_dict_or_path=config):
        model = nn.Sequential(
            *(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        )
    engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(engine.global_rank)
    for _ in range(STEPS):
        before = MOVED[BETWEEN]
        batch = torch.randn(ROWS, WIDTH, generator=generator).to(engine.device)
        loss = (engine(batch) - batch).square().mean()
        engine.backward(loss)
        engine.step()
    crossed = MOVED[BETWEEN] - before
    torch.distributed.all_reduce(loss.detach_())
    held = sum(group.shard.numel() for group in engine.groups)
    engine.destroy()
    return loss.item() / engine.world_size, held, crossed


def main() -> None:
    for way, section in WAYS.items():
        loss, held, crossed = train(section)
        if torch.distributed.get_rank() == 0:
            print(
                f"{way:<8} loss {loss:.6f}, {held} elements in shards, {crossed} bytes to the "
                "other group in a step"
            )


if __name__ == "__main__":
    main()
