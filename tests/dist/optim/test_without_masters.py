"""bf16 training without fp32 masters: where values lie changes no bit, and small updates count."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import Adafactor

import zero
from tests.dist.training import adamw, assert_same_weights, ds_config, split, start, step
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL
from tests.processes import on_ranks, run_on
from zero.errors import UsageError
from zero.fragments import safe_get_full_fp32_param, safe_set_full_fp32_param
from zero.offload import tiers
from zero.optim import rounding

STEPS = 4
LR = 1e-4  # small, so that updates are much smaller than the distance between bf16 numbers
BF16 = {"enabled": True, "bf16_master_weights_and_grads": True}
MAKE = {
    "AdamW": adamw,
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "Adafactor": partial(Adafactor, lr=1e-3, relative_step=False, scale_parameter=False),
}


def dtypes_of_state(engine: zero.ZeroEngine) -> set[torch.dtype]:
    values = [value for state in engine.optimizer.state.values() for value in state.values()]
    return {value.dtype for value in values if torch.is_tensor(value) and value.dim()}


def trained(
    rank: int, world_size: int, name: str, states: bool, sections: dict, folder: str
) -> dict:
    """Return the weights after some steps in which all ranks have the same batches.

    Half-way a new engine resumes.
    """
    tiers.LEAST_BYTES_IN_A_FILE = 1
    rounding.BLOCK = 128  # less than a parameter
    config = ds_config(
        bf16=BF16 | {"bf16_optimizer_states": states}, accumulation=2, **SMALL | sections
    )
    data = [split(batch, 2) for batch in batches("llama", STEPS)]
    engine, _ = start(build("llama"), config, make=MAKE[name])
    for number, parts in enumerate(data):
        if number == STEPS // 2:
            engine.save_checkpoint(folder)
            engine, _ = start(build("llama"), config, make=MAKE[name])
            engine.load_checkpoint(folder)
        step(engine, parts)
    assert all(shard.master.dtype == torch.bfloat16 for shard in engine.optimizer.shards.values())
    assert dtypes_of_state(engine) == ({torch.bfloat16} if states else {torch.float32})
    return engine._zero3_consolidated_16bit_state_dict()


NVME = {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}
CPU = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("name", "states", "cases"),
    [
        ("AdamW", True, [(2, {"stage": 1}), (2, NVME)]),
        ("SGD", False, [(4, CPU)]),
        ("Adafactor", False, [(2, NVME)]),
    ],
)
def test_ranks_stages_and_tiers_change_no_bit(name, states, cases, tmp_path):
    expected = run_on(1, trained, name, states, {}, str(tmp_path / "one"))[0]
    before = build("llama").bfloat16().state_dict()
    assert any(not torch.equal(value, before[key]) for key, value in expected.items())
    for number, (ranks, sections) in enumerate(cases):
        if sections is NVME:
            sections = {key: value | {"nvme_path": str(tmp_path)} for key, value in NVME.items()}
        found = run_on(ranks, trained, name, states, sections, str(tmp_path / str(number)))[0]
        assert_same_weights(found, expected)


def after_steps(rank: int, world_size: int, masters: bool) -> torch.Tensor:
    """Return the precise weights after 30 steps of SGD with one batch, as fp32."""
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": not masters}
    config = ds_config(bf16=bf16, stage=0, data_types={"grad_accum_dtype": "fp32"})
    engine, _ = start(build("llama"), config, make=partial(torch.optim.SGD, lr=LR))
    params = list(engine.module.parameters())
    if masters:  # the same start: rounded weights
        for param in params:
            safe_set_full_fp32_param(param, param.detach().float())
    for batch in batches("llama", 1) * 30:
        step(engine, [batch])
    return torch.cat([safe_get_full_fp32_param(param).view(-1) for param in params])


def test_updates_smaller_than_bf16_count_on_the_average():
    """Each update is about a hundredth of the distance between bf16 numbers: rounding to nearest
    would lose all.
    """
    started = [param.detach().bfloat16().view(-1) for param in build("llama").parameters()]
    moved, wanted = (
        (run_on(1, after_steps, masters)[0] - torch.cat(started)).double()
        for masters in (False, True)
    )
    assert (moved == 0).double().mean() > 0.5, "most are still where they were"
    # The projection on the wanted movement is 1 on the average.
    assert (moved @ wanted / (wanted @ wanted)).item() == pytest.approx(1, abs=0.25)


@on_ranks(1)
def test_state_of_whole_tensors_keeps_its_dtype(rank, world_size):
    config = ds_config(bf16=BF16 | {"bf16_optimizer_states": True})
    message = "bf16.bf16_optimizer_states: Adafactor updates whole tensors"
    with pytest.raises(UsageError, match=message):
        start(build("llama"), config, make=MAKE["Adafactor"])


@on_ranks(2)
def test_moments_have_the_dtype_of_the_run_and_not_of_the_checkpoint(rank, world_size, tmp_path):
    """Save with bf16 moments. Resume with fp32 ones and with masters, and the other way."""
    data = [split(batch, 2)[rank : rank + 1] for batch in batches("llama", 4)]
    narrow = BF16 | {"bf16_optimizer_states": True}
    for number, section in enumerate((narrow, BF16, {"enabled": True}, narrow)):
        engine, _ = start(build("llama"), ds_config(bf16=section), make=MAKE["AdamW"])
        if number:
            engine.load_checkpoint(tmp_path)
        step(engine, data[number])
        engine.save_checkpoint(tmp_path)
        assert dtypes_of_state(engine) == {torch.bfloat16 if section is narrow else torch.float32}


@on_ranks(2)
def test_a_schedule_free_run_resumes_with_the_same_bits(rank, world_size, tmp_path):
    """Losses after a save in `eval()`: of the run that goes on, and of one that resumes."""
    kind = pytest.importorskip("schedulefree").AdamWScheduleFree
    found, data = [], [split(batch, 2)[rank : rank + 1] for batch in batches("llama", 4)]
    for resumes in (False, True):
        engine, optimizer = start(build("llama"), ds_config(bf16=BF16), make=partial(kind, lr=1e-2))
        if resumes:
            engine.load_checkpoint(tmp_path)
        else:
            optimizer.train()
            step(engine, data[0])
            step(engine, data[1])
            optimizer.eval()
            engine.save_checkpoint(tmp_path)
        optimizer.train()
        found.append([loss for parts in data[2:] for loss in step(engine, parts)])
    assert found[0] == found[1]
