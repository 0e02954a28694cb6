"""Training with 8-bit moments: near fp32 moments, and checkpoints for any other run.

tests/dist/offload/test_read_ahead.py compares the bits of files and host memory.
"""

from __future__ import annotations

import statistics
from functools import partial

import pytest
import torch

import zero
from tests.dist.training import (
    Make,
    adamw,
    ds_config,
    relative,
    split,
    start,
    step,
)
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL
from tests.processes import on_ranks, run_on
from zero.errors import UsageError
from zero.fragments import (
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
)
from zero.offload import tiers
from zero.optim import adam8bit

CPU = {"offload_optimizer": {"device": "cpu"}}
CODED = {"zero_quantized_moments": True}
STEPS = 120
BF16 = {"enabled": True, "bf16_master_weights_and_grads": True}


def engine_with(sections: dict, make: Make = adamw) -> zero.ZeroEngine:
    tiers.LEAST_BYTES_IN_A_FILE = 1
    accumulation = 4 // torch.distributed.get_world_size()
    return start(
        build("llama"), ds_config(accumulation=accumulation, **SMALL | sections), make=make
    )[0]


def losses_of(engine: zero.ZeroEngine, data: list) -> list[float]:
    """Train, and return the mean loss of each step over all ranks."""
    world, rank = engine.comm.world_size, engine.comm.rank
    own = [statistics.mean(step(engine, split(batch, 4)[rank::world])) for batch in data]
    return (engine.comm.all_reduce(torch.tensor(own, device=engine.comm.device)) / world).tolist()


def moments_of(engine: zero.ZeroEngine) -> dict[str, torch.Tensor]:
    """The moments of all parameters, as a script sees them."""
    return {
        f"{key} {name}": value
        for name, param in engine.module.named_parameters()
        for key in (*adam8bit.KEYS, "max_exp_avg_sq")
        if (value := safe_get_full_optimizer_state(param, key)) is not None
    }


def trained(rank: int, world_size: int, sections: dict, steps: int) -> tuple[list[float], dict]:
    """Learn four batches by heart. Return the losses and the weights."""
    engine = engine_with(sections)
    losses = losses_of(engine, (batches("llama", 4) * steps)[:steps])
    for sub_group in engine.optimizer.sub_groups:
        state, numel = engine.optimizer.state[sub_group.master], sub_group.master.numel()
        assert all(
            adam8bit.is_coded(state[key], numel) == ("zero_quantized_moments" in sections)
            for key in adam8bit.KEYS
        )
    return losses, engine._zero3_consolidated_16bit_state_dict()


def test_losses_stay_near_those_of_fp32_moments():
    """Rounding moments to codes moves a loss as 2% of it at most, while it falls by half, and the
    last ones by 1%.
    """
    expected = run_on(1, trained, CPU, STEPS)[0][0]
    assert expected[-1] < 0.5 * expected[0]
    few = (2, CODED | CPU | {"stage": 2}, STEPS // 3)
    for ranks, sections, steps in ((1, CODED | CPU, STEPS), few):
        found = run_on(ranks, trained, sections, steps)[0][0]
        assert relative(found[:10], expected[:10]) < 1e-4
        assert relative(found, expected[:steps]) < 0.03
        assert statistics.mean(found[-20:]) == pytest.approx(
            statistics.mean(expected[:steps][-20:]), rel=0.015
        )


def continued(
    rank: int, world_size: int, sections: dict, source: str | None, target: str, make: Make = adamw
) -> tuple[list[float], dict]:
    """Begin a run, or resume from `source`, and save.

    Return the losses that follow, and the moments when it was saved.
    """
    engine, data = engine_with(sections, make), batches("llama", 4)
    if source is None:
        losses_of(engine, data)
    else:
        engine.load_checkpoint(source)
    engine.save_checkpoint(target)
    found = moments_of(engine)
    return losses_of(engine, data), found


CHANGES = {
    "other ranks": ((2, CODED | CPU), (1, CODED | CPU)),
    "more ranks, another stage": ((1, CODED), (4, CODED | {"stage": 1})),
    "each rank writes a half": ((2, CODED | {"stage": 0}), (1, CODED)),
    "codes to fp32": ((2, CODED | CPU), (2, CPU)),
    "fp32 to codes": ((2, CPU), (1, CODED)),
    "fp32 to codes and back, amsgrad": ((2, CPU), (2, CODED | CPU), (2, CPU)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_checkpoints_fit_any_other_run(change, tmp_path):
    """Blocks lie elsewhere then: each moment is rounded once more.

    If the new run has fp32 moments, nothing is; third moments never are.
    """
    (ranks, sections), *others = CHANGES[change]
    # The checkpoint brings `amsgrad` along.
    make = partial(torch.optim.AdamW, lr=1e-3, amsgrad=True) if "amsgrad" in change else adamw
    folders = [f"{tmp_path}/{number}" for number in range(3)]
    losses, moments = run_on(ranks, continued, sections, None, folders[0], make)[0]
    for (ranks, sections), *places in zip(others, folders, folders[1:], strict=False):
        again, found = run_on(ranks, continued, sections, *places)[0]
        for name, value in moments.items():
            if "zero_quantized_moments" not in sections or "max" in name:
                assert torch.equal(found[name], value)
            within = 0.02 * value.abs().max().item()
            assert torch.allclose(found[name], value, rtol=0.02, atol=within), name
            assert not ((found[name] == 0) & (value > 0)).any() or "exp_avg_sq" not in name
        assert relative(again, losses) < 1e-3
        moments = found


@on_ranks(2)
def test_scripts_read_and_set_coded_moments(rank, world_size):
    engine = engine_with(CODED | CPU)
    losses_of(engine, batches("llama", 1))
    param = next(iter(engine.module.parameters()))
    before = moments_of(engine)
    value = torch.linspace(0.5, 1, param.ds_numel).view(param.ds_shape)
    safe_set_full_optimizer_state(param, value, "exp_avg_sq")
    assert torch.allclose(safe_get_full_optimizer_state(param, "exp_avg_sq"), value, rtol=0.017)
    after = moments_of(engine)
    names = [name for name in after if not torch.equal(after[name], before[name])]
    assert len(names) == 1 and names[0].startswith("exp_avg_sq"), names


REFUSED = {
    "SGD": ({}, partial(torch.optim.SGD, lr=1e-2)),
    "AdamW": ({}, partial(torch.optim.AdamW, amsgrad=True)),
    "Adafactor": ({}, partial(torch.optim.Adafactor, lr=1e-3)),
    "bf16.bf16_optimizer_states": ({"bf16": BF16 | {"bf16_optimizer_states": True}}, adamw),
}


@on_ranks(1)
def test_what_has_no_coded_moments_is_refused(rank, world_size):
    for name, (sections, make) in REFUSED.items():
        with pytest.raises(UsageError, match="zero_optimization.zero_quantized_moments") as raised:
            engine_with(CODED | sections, make)
        assert name in str(raised.value)
