"""Ray Train starts the ranks, and zero trains in them. Ray takes the place of torchrun and of `zero
launch`.

    pip install "ray[train]"        # not in requirements.txt: with what it needs it is 500 MB
    python examples/ray_train.py --workers 2
    python examples/ray_train.py --workers 1 --steps 80

The second command goes on from the last checkpoint in `--output`, on one worker, with the same
global batch. So does a job of which a worker has failed. Ray runs on this machine, or on the
cluster that RAY_ADDRESS names: then all machines need this package, and a shared folder for
`--output`. The model learns the sums of its inputs."""
# Ray is no requirement of this repository, so a type checker may not find it.
# pyright: reportMissingImports=false

import argparse
import os
from pathlib import Path

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer
from torch import nn

REPOSITORY = str(Path(__file__).resolve().parent.parent)
ROWS, MICRO, WIDTH = 24, 2, 32
CONFIG = {
    "train_batch_size": ROWS,  # on any number of workers: the accumulation follows
    "train_micro_batch_size_per_gpu": MICRO,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def work(options: dict) -> None:
    """Run by each worker, and again by all if one of them has failed.

    `options` are those of the command line.
    """
    import zero

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    engine, _, _, _ = zero.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    if (options["output"] / "latest").exists():
        engine.load_checkpoint(options["output"])
    while engine.global_steps < options["steps"]:
        generator = torch.Generator().manual_seed(engine.global_steps)
        batches = torch.randn(ROWS, WIDTH, generator=generator).to(engine.device).split(MICRO)
        total = torch.zeros((), device=engine.device)
        for part in range(engine.gradient_accumulation_steps()):
            own = batches[part * engine.world_size + engine.global_rank]
            loss = (engine(own) - own.sum(1, keepdim=True)).square().mean()
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        torch.distributed.all_reduce(total)
        metrics = {
            "step": engine.global_steps,
            "loss": total.item() / len(batches),
            "workers": engine.world_size,
        }
        if engine.global_rank == 0:
            print("step {step}: loss {loss:.6f} on {workers} workers".format(**metrics))
        if engine.global_steps % options["save_every"] == 0:
            engine.save_checkpoint(options["output"])
        train.report(metrics)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("output/ray_train"))
    options = vars(parser.parse_args())
    options["output"] = options["output"].resolve()
    # Workers find a checkout that is not installed.
    path = os.pathsep.join(filter(None, [REPOSITORY, os.environ.get("PYTHONPATH")]))
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}})
    trainer = TorchTrainer(
        work,
        train_loop_config=options,
        scaling_config=train.ScalingConfig(
            num_workers=options["workers"], use_gpu=torch.cuda.is_available()
        ),
        run_config=train.RunConfig(
            storage_path=str(options["output"] / "ray"),
            failure_config=train.FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
