"""A plain torch loop: build the model sharded, train, save, resume, evaluate, write the finished
model.

    torchrun --nproc_per_node 2 examples/torch_loop.py
    torchrun --nproc_per_node 2 examples/torch_loop.py --resume --steps 300

The model learns to write a sequence of 12 symbols backwards. Everything is made here, nothing is
downloaded."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # for a checkout that is not installed
import zero

SYMBOLS, LENGTH, WIDTH, ROWS = 16, 12, 64, 32
CONFIG = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 20}},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


class Reverser(nn.Module):
    """From token ids (rows, LENGTH) to logits (rows, LENGTH, SYMBOLS)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) + self.position(torch.arange(LENGTH, device=ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def batch(number: int, rank: int, ranks: int) -> torch.Tensor:
    """Return the ids of a rank's micro-batch `number`.

    Ranks have different ones. Each call gives the same.
    """
    generator = torch.Generator().manual_seed(1000 + number * ranks + rank)
    return torch.randint(SYMBOLS, (ROWS, LENGTH), generator=generator)


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().clone()
    torch.distributed.all_reduce(total)
    return total.item() / torch.distributed.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--output", type=Path, default=Path("output/torch_loop"))
    parser.add_argument(
        "--resume", action="store_true", help="resume from the last checkpoint in --output"
    )
    args = parser.parse_args()

    torch.manual_seed(0)
    with zero.Init(config_dict_or_path=CONFIG):  # no rank ever holds the whole model
        model = Reverser()
    engine, _, _, _ = zero.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    rank, ranks = engine.global_rank, engine.world_size
    say = print if rank == 0 else lambda text: None
    if args.resume:
        path, state = engine.load_checkpoint(args.output)
        say(f"resumed from {path}, where the loss was {state['loss']:.4f}")

    while engine.global_steps < args.steps:
        ids = batch(engine.micro_steps, rank, ranks).to(engine.device)
        loss = nn.functional.cross_entropy(engine(ids).flatten(0, 1), ids.flip(1).flatten())
        updates = engine.is_gradient_accumulation_boundary()
        engine.backward(loss)
        engine.step()
        if updates and engine.global_steps % args.save_every == 0:
            mean = mean_over_ranks(loss)
            say(
                f"step {engine.global_steps}: loss {mean:.6f}, learning rate "
                f"{engine.get_lr()[0]:.1e}"
            )
            engine.save_checkpoint(args.output, client_state={"loss": mean})

    engine.eval()
    with torch.no_grad():
        ids = batch(-1, rank, ranks).to(engine.device)
        right = mean_over_ranks((engine(ids).argmax(-1) == ids.flip(1)).float().mean())
    say(f"accuracy on new sequences: {right:.3f}")
    engine.save_16bit_model(args.output / "model")


if __name__ == "__main__":
    main()
