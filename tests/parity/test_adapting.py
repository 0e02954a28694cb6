"""`"on_out_of_memory": "adapt"`: steps in which memory errors are planted have the numbers of a run
without them, or the error says why they cannot be repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

import zero
from tests.dist.training import ds_config, relative
from tests.parity.models import VOCABULARY, build
from tests.processes import run_on
from zero.engine import ZeroEngine
from zero.errors import UsageError

STEPS, ROWS, LENGTH = 3, 4, 12
Inputs = dict[str, torch.Tensor]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def packed(engine: Any, ids: torch.Tensor) -> torch.Tensor:
    """Documents in one row. With a cache, which a model makes by default, they see each other."""
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]
    return engine(input_ids=ids[:1], labels=ids[:1], position_ids=positions).loss


def of_logits(engine: Any, ids: torch.Tensor) -> torch.Tensor:
    """The forward gets no labels."""
    logits = engine(input_ids=ids).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def of_preferences(engine: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = engine(input_ids=ids).logits[:, :-1].log_softmax(-1)
    sums = logits.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(1)
    return -functional.logsigmoid(sums[: ROWS // 2] - sums[ROWS // 2 :]).mean()


def of_embeddings(engine: Any, ids: torch.Tensor) -> torch.Tensor:
    """An input has a gradient of its own."""
    width = engine.module.config.hidden_size
    embedded = torch.ones(*ids.shape, width, requires_grad=True)
    return engine(inputs_embeds=embedded, labels=ids).loss


def train(rank: int, world_size: int, name: str, loss_of: Loss, stage: int, act: str) -> list[Any]:
    """Losses and norms. With "adapt", the last rank runs out of memory in the second step: in a
    backward, and, if more than one row is there to be changed, in the forward before it.
    """
    planted = ["backward"] if loss_of is packed else ["forward", "backward"]
    if act == "explain" or rank < world_size - 1:
        planted = []
    run, backward = ZeroEngine._forward, torch.autograd.backward

    def forward(self: Any, *args: Any, **given: Any) -> Any:
        output = run(self, *args, **given)
        if self.global_steps and planted[:1] == ["forward"]:
            planted.pop(0)
            raise MemoryError("planted")
        return output

    def failing_backward(*args: Any, **given: Any) -> None:
        backward(*args, **given)
        is_engines = isinstance(args[0], list)  # the script's ends at the forward's outputs
        if is_engines and engine.global_steps and planted[:1] == ["backward"]:
            planted.pop(0)
            raise MemoryError("planted")

    config = ds_config(stage=stage, accumulation=2) | {"on_out_of_memory": act}
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=config)
    generator, found = torch.Generator().manual_seed(rank), []
    with (
        mock.patch.object(ZeroEngine, "_forward", forward),
        mock.patch.object(torch.autograd, "backward", failing_backward),
    ):
        for _ in range(STEPS):
            for _ in range(2):
                ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
                loss = loss_of(engine, ids)
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            found.append(engine.get_global_grad_norm())
    assert not planted
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("name", "loss_of", "stage"),
    [
        ("llama", packed, 3),
        ("gpt2", packed, 1),
        ("llama", of_logits, 3),
        ("gpt2", of_logits, 2),
        ("llama", of_preferences, 3),
    ],
)
def test_repeated_steps_have_the_usual_numbers(name, loss_of, stage):
    usual = run_on(2, train, name, loss_of, stage, "explain")
    for adapted, expected in zip(
        run_on(2, train, name, loss_of, stage, "adapt"), usual, strict=True
    ):
        assert relative(adapted, expected) < 2e-6


def refused(rank: int, world_size: int, stage: int) -> str:
    with pytest.raises((MemoryError, torch.OutOfMemoryError, UsageError)) as raised:
        train(rank, world_size, "llama", of_embeddings, stage, "adapt")
    return str(raised.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_gradient_of_an_input_would_be_added_again(stage):
    assert all("an input requires a gradient" in text for text in run_on(2, refused, stage))


class Interrupted(torch.autograd.Function):
    """An error, or Ctrl-C, in the script's own part of a backward."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


def left_out(rank: int, world_size: int, act: str) -> float:
    config = ds_config(stage=1) | {"on_out_of_memory": act}
    model = build("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=config)
    ids = torch.arange(3, 3 + LENGTH)[None]
    for added in (Interrupted.apply(torch.zeros((), requires_grad=True)), 0.0):
        try:
            engine.backward(engine(input_ids=ids, labels=ids).loss + added)
        except KeyboardInterrupt:
            engine.zero_grad()
    engine.step()
    return engine.get_global_grad_norm()


def test_a_backward_that_was_interrupted_does_not_count():
    assert run_on(1, left_out, "adapt") == run_on(1, left_out, "explain")
