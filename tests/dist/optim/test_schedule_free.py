"""Schedule-free optimizers: `train()` and `eval()` exchange the weights, as in one process."""

from __future__ import annotations

import pytest
import torch

import zero
from tests.dist.training import Batch, ds_config, relative, split, start, step, train_plain
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL
from tests.processes import on_ranks, run_on
from tests.tolerance import rounding
from zero.errors import UsageError
from zero.offload import tiers

schedulefree = pytest.importorskip("schedulefree")

STEPS = 3
MAKE = {
    "AdamW": lambda groups: schedulefree.AdamWScheduleFree(
        groups, lr=1e-2, weight_decay=0.1, warmup_steps=2
    ),
    "SGD, one by one": lambda groups: schedulefree.SGDScheduleFree(groups, lr=1e-2, foreach=False),
}
Found = dict[str, list[float]]


def halves_of(data: list[Batch]) -> tuple[list[Batch], list[Batch]]:
    return data[:STEPS], data[STEPS:]


def plain(rank: int, world_size: int, name: str) -> Found:
    """Train, evaluate, train, evaluate, in plain torch."""
    model, made = build("llama"), {}

    def make(groups):
        if not made:
            made["optimizer"] = MAKE[name](groups)
        made["optimizer"].train()
        return made["optimizer"]

    found: Found = {"losses": [], "evaluated": []}
    for part in halves_of(batches("llama", 2 * STEPS)):
        curve = train_plain(model, part, make=make)
        made["optimizer"].eval()
        with torch.no_grad():
            found["evaluated"].append(model(**part[0]).loss.item())
        found["losses"] += curve.mean_losses()
    return found


def sharded(rank: int, world_size: int, name: str, sections: dict, folder: str) -> Found:
    """The same with the engine. The second half runs in a new one, from a checkpoint."""
    tiers.LEAST_BYTES_IN_A_FILE = 1
    config, found = ds_config(**SMALL | sections), {"losses": [], "evaluated": []}
    for number, part in enumerate(halves_of(batches("llama", 2 * STEPS))):
        engine, optimizer = start(build("llama"), config, make=MAKE[name])
        if number:
            engine.load_checkpoint(folder)

        def mean(loss: float, comm=engine.comm) -> float:
            return comm.all_reduce(torch.tensor(loss, device=comm.device)).item() / world_size

        for batch in part:
            optimizer.train()  # as the Trainer calls it
            (loss,) = step(engine, [split(batch, world_size)[rank]])
            found["losses"].append(mean(loss))
        optimizer.eval()
        engine.save_checkpoint(folder)
        with torch.no_grad():
            inputs = split(part[0], world_size)[rank]
            own = {key: value.to(engine.comm.device) for key, value in inputs.items()}
            found["evaluated"].append(mean(engine(**own).loss.item()))
    return found


# (optimizer, ranks, keys of the section zero_optimization)
CASES = [
    ("AdamW", 1, {}),
    ("SGD, one by one", 2, {"stage": 0}),
    ("AdamW", 2, {"stage": 2}),
    ("AdamW", 3, {}),
    ("AdamW", 2, {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}}),
]


def compare(found: Found, name: str, same_bits: bool = False) -> None:
    expected = run_on(1, plain, name)[0]
    assert expected["losses"][STEPS - 1] != expected["evaluated"][0]
    for key in ("losses", "evaluated"):
        if same_bits:
            assert found[key] == expected[key]
        assert relative(found[key], expected[key]) <= rounding(torch.float32, 1000, 2 * STEPS)


@pytest.mark.parametrize(("name", "ranks", "sections"), CASES)
def test_losses_of_both_kinds_of_weights_are_those_of_one_process(name, ranks, sections, tmp_path):
    sections = {key: value | {"nvme_path": str(tmp_path)} if key == "offload_optimizer" else value
                for key, value in sections.items()}  # fmt: skip
    found = run_on(ranks, sharded, name, sections, str(tmp_path / "saved"))[0]
    compare(found, name, same_bits=ranks == 1)


@on_ranks(1)
def test_what_cannot_work_is_refused_by_name(rank, world_size):
    config = ds_config(elementwise_optimizer=True)
    _engine, optimizer = start(build("llama"), config, make=MAKE["AdamW"])
    with pytest.raises(UsageError, match="delete zero_optimization.elementwise_optimizer"):
        optimizer.train()
    optimizer = schedulefree.ScheduleFreeWrapper(torch.optim.SGD([torch.nn.Parameter()], lr=0.1))
    message = "ScheduleFreeWrapper cannot be used: it wraps another optimizer"
    with pytest.raises(UsageError, match=message):
        zero.initialize(model=build("llama"), optimizer=optimizer, config=ds_config())
