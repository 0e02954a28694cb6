"""`zero verify` compares recordings: what two runs on plain torch say about rounding."""

import json
from pathlib import Path

import pytest
import torch

from zero.errors import UsageError
from zero.tools.verify.compare import compare

EPS = torch.finfo(torch.float32).eps
START = {"a": torch.ones(8), "b": torch.ones(4)}


def write(folder: Path, gradients: dict[str, torch.Tensor], applied: bool = True) -> Path:
    """One step of SGD with a learning rate of 0.1."""
    folder.mkdir()
    norm = torch.cat(list(gradients.values())).norm().item()
    facts = {"applied": applied, "eps": EPS, "eps_of_update": EPS}
    for step in (0, 1):
        (folder / f"{step}.json").write_text(json.dumps(facts))
    numbers = {"loss": {"a loss": 1.0}, "setting": {"lr": 0.1}, "norm": {"all gradients": norm}}
    for kind, found in numbers.items():
        tensors = {name: torch.tensor(value) for name, value in found.items()}
        torch.save(tensors, folder / f"1.{kind}.pt")
    values = {name: START[name] - 0.1 * gradient for name, gradient in gradients.items()}
    for name, tensors in (("0.value", START), ("1.gradient", gradients), ("1.value", values)):
        torch.save(tensors, folder / f"{name}.pt")
    return folder


def test_batches_that_are_drawn_at_random_are_named(tmp_path: Path):
    """The two runs on plain torch differ as much as the one on the engine."""
    gradients = [
        {name: torch.randn(values.shape) for name, values in START.items()} for _ in range(3)
    ]
    folders = [write(tmp_path / str(number), each) for number, each in enumerate(gradients)]
    with pytest.raises(UsageError, match="set a seed"):
        compare(*folders)


def test_a_step_that_overflows_by_rounding_alone_is_named(tmp_path: Path):
    folders = [
        write(tmp_path / name, START, applied=name != "disturbed")
        for name in ("engine", "plain", "disturbed")
    ]
    with pytest.raises(UsageError, match="whether step 1 overflows"):
        compare(*folders)
