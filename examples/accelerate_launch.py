r"""A script without any mention of zero, started by `accelerate launch` with a configuration for
DeepSpeed.

    python -m zero run accelerate launch --config_file examples/deepspeed_zero3.yaml \
        examples/accelerate_launch.py

A small network learns which of four numbers is the largest.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("output/accelerate_launch"))
    args = parser.parse_args()

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    numbers = torch.randn(1024, 4)
    data = DataLoader(TensorDataset(numbers, numbers.argmax(1)), batch_size=16)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    accelerator.print(
        f"{accelerator.distributed_type.name} on {accelerator.num_processes} processes"
    )
    for epoch in range(1, args.epochs + 1):
        losses = []
        for inputs, largest in data:
            loss = nn.functional.cross_entropy(model(inputs), largest)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        accelerator.print(
            f"epoch {epoch}: loss {accelerator.reduce(torch.stack(losses).mean(), 'mean'):.6f}"
        )
    accelerator.save_model(model, args.output)  # all ranks gather, the first one writes
    accelerator.end_training()


if __name__ == "__main__":
    main()
