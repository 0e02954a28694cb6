"""`examples/lightning_fit.py` under DDP and on the engine, for `benchmarks.compatibility`.

Lightning has its own loop, launcher and checkpoints, so losses are read from the example's output,
with seven digits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.runner import REPOSITORY

EPOCHS, SAVED, TIMEOUT = 4, 1, 300


class Fitted(NamedTuple):
    """The losses of each epoch (training, validation), and the weights of the last checkpoint."""

    losses: list[tuple[float, float]]
    weights: dict[str, torch.Tensor]


def fit(strategy: str, out: Path, *options: str) -> Fitted:
    """Run the example. Raises RuntimeError with the end of a failed run's output."""
    command = [
        *("-m", "zero", "run", "examples/lightning_fit.py"),
        "--strategy",
        strategy,
        "--epochs",
        str(EPOCHS),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, "--output", str(out), *options],
        cwd=REPOSITORY, env=env, text=True, capture_output=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-4000:])
    lines = re.findall(r"^epoch \d+: train (\S+), valid (\S+)$", done.stdout, re.MULTILINE)
    file = out / (f"epoch={EPOCHS - 1}.ckpt" if strategy == "ddp" else "model.ckpt")
    weights = torch.load(file, map_location="cpu", weights_only=False)["state_dict"]
    return Fitted([(float(train), float(valid)) for train, valid in lines], weights)


def differences(strategy: str, out: Path, reference: Fitted) -> dict[str, float]:
    """Return the largest absolute differences to DDP: losses, losses of a resumed run, weights of
    both runs.
    """
    straight = fit(strategy, out)
    resumed = fit(
        strategy, out.with_name(out.name + "_resumed"), "--resume", str(out / f"epoch={SAVED}.ckpt")
    )
    weights = [_between(run.weights, reference.weights) for run in (straight, resumed)]
    return {
        "loss": _of_losses(straight.losses, reference.losses),
        "resumed": _of_losses(resumed.losses, reference.losses[SAVED + 1 :]),
        "weights": max(weights),
    }


def _of_losses(found: list[tuple[float, float]], wanted: list[tuple[float, float]]) -> float:
    return max(
        abs(a - b)
        for pair, other in zip(found, wanted, strict=True)
        for a, b in zip(pair, other, strict=True)
    )


def _between(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    if found.keys() != wanted.keys():
        raise RuntimeError(f"other names than DDP's: {sorted(found.keys() ^ wanted.keys())}")
    return max((found[name].float() - wanted[name]).abs().max().item() for name in wanted)
