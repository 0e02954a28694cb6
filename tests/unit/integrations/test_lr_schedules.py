"""zero.integrations.deepspeed.lr_schedules against DeepSpeed's closed formulas, which are written
again here.
"""

import math

import pytest
import torch

from zero.config import load_config
from zero.errors import UsageError
from zero.integrations.deepspeed.lr_schedules import (
    VALID_LR_SCHEDULES,
    OneCycle,
    WarmupCosineLR,
    WarmupLR,
    build_scheduler,
)


def optimizer(*rates, kind=torch.optim.SGD):
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.5,)
    ]
    return kind(groups)


def seen_over(scheduler, steps, key="lr", group=0):
    """Return this setting of a group in each of the next `steps` optimizer steps."""
    seen = []
    for _ in range(steps):
        seen.append(scheduler.optimizer.param_groups[group][key])
        scheduler.step()
    return seen


def warmup(low, high, kind, length=10):
    """Return the learning rates of the first steps, the last of which has the highest one."""
    if kind == "log":
        shares = [math.log(i) / math.log(length) for i in range(1, length + 1)]
    else:
        shares = [(i - 1) / length for i in range(1, length + 1)]
    return [low, *(low + (high - low) * share for share in shares)]


KINDS = "log", "linear"
DECAY = [0.01 + 0.09 * max(0, 26 - i) / 15 for i in range(11, 30)]
COSINE = [0.5 * (0.55 + 0.45 * math.cos(math.pi * min(i - 10, 15) / 15)) for i in range(11, 30)]
COSINES = {kind: [0, *warmup(0.1, 0.5, kind)[1:], *COSINE] for kind in KINDS}
CYCLE = {"cycle_first_step_size": 4, "cycle_second_step_size": 2, "decay_step_size": 2}
STAIRS = {
    "cycle_first_step_size": 6, "cycle_second_step_size": 3,
    "cycle_first_stair_count": 2, "cycle_second_stair_count": 1,
}  # fmt: skip
# A schedule, its arguments by position and by name, and the rates of the first steps.
RATES = [
    *(("WarmupLR", (0.01, 0.1, 10, k), {}, warmup(0.01, 0.1, k) + [0.1] * 9) for k in KINDS),
    *(("WarmupLR", (0.0, 0.1, length), {}, [0.0, 0.0, 0.1, 0.1, 0.1]) for length in (0, 1, 2)),
    *(("WarmupDecayLR", (25, 0.01, 0.1, 10, k), {}, warmup(0.01, 0.1, k) + DECAY) for k in KINDS),
    *(("WarmupCosineLR", (25, 0.2, 10, 0.1, k), {}, COSINES[k]) for k in KINDS),
    ("LRRangeTest", (0.1, 3, 2.0), {}, [0.1 + 0.2 * i / 3 for i in range(7)]),
    ("LRRangeTest", (0.1, 3, 2.0, True), {}, [0.1] * 3 + [0.3] * 3 + [0.5]),
    ("OneCycle", (0.1, 0.5, 0.5), CYCLE, [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, 0.08, 0.1 / 1.5]),
    ("OneCycle", (0.1, 0.5, 0.5), {"cycle_first_step_size": 2}, [0.1, 0.3, 0.5, 0.3, *[0.1] * 3]),
    ("OneCycle", (0, 1), STAIRS, [0, 0, 0, 0.5, 0.5, 0.5, 1, 0, 0]),
]


@pytest.mark.parametrize(("name", "args", "settings", "expected"), RATES)
def test_the_rates_are_those_of_the_formulas(name, args, settings, expected):
    scheduler = VALID_LR_SCHEDULES[name](optimizer(), *args, **settings)
    assert seen_over(scheduler, len(expected)) == pytest.approx(expected, rel=1e-12)


def test_a_cosine_without_room_after_the_warmup_stays_at_its_end():
    scheduler = WarmupCosineLR(optimizer(0.5), 10, warmup_num_steps=10, cos_min_ratio=0.1)
    assert seen_over(scheduler, 15)[11:] == pytest.approx([0.05] * 4)


def test_each_group_has_its_own_rate():
    for scheduler in (
        WarmupLR(optimizer(0.5, 0.25), warmup_num_steps=2),
        WarmupCosineLR(optimizer(0.5, 0.25), 100, warmup_num_steps=2),
    ):
        scheduler.step(1)
        assert scheduler.get_last_lr() == pytest.approx([0.5, 0.25])
    assert (scheduler.get_lr_ratio(), scheduler.warmup_num_steps) == (1.0, 2)
    assert WarmupLR(optimizer(0.5, 0.5), [0.1, 0.2]).get_last_lr() == [0.1, 0.2]
    with pytest.raises(ValueError, match="warmup_min_lr: 3 values for 2 parameter groups"):
        WarmupLR(optimizer(0.5, 0.5), [0.1, 0.2, 0.3])


def test_one_cycle_moves_the_momentum_against_the_rate():
    for group, low in enumerate((0.5, 0.6)):
        scheduler = OneCycle(
            optimizer(1.0, 2.0, kind=torch.optim.Adam), 0.1, 0.5, decay_mom_rate=0.01,
            cycle_first_step_size=2, decay_step_size=1, cycle_min_mom=[0.5, 0.6], cycle_max_mom=0.9,
        )  # fmt: skip
        seen = seen_over(scheduler, 6, "betas", group)
        middle = (low + 0.9) / 2
        expected = [low, middle, low, middle, 0.9, 0.9 * 1.01]
        assert [betas[0] for betas in seen] == pytest.approx(expected, rel=1e-12)
        assert {betas[1] for betas in seen} == {0.99}
    assert [mom for mom, _ in scheduler.get_mom()] == pytest.approx([0.9 * 1.02] * 2, rel=1e-12)


def test_one_cycle_leaves_the_momentum_where_it_is_told_or_there_is_none(caplog):
    told = OneCycle(optimizer(kind=torch.optim.Adam), 0.1, 0.5, cycle_momentum=False)
    assert seen_over(told, 2, "betas") == [(0.9, 0.999)] * 2
    assert told.get_mom() is None and not caplog.records
    assert OneCycle(optimizer(), 0.1, 0.5).get_mom() is None
    assert "cycle_momentum has no effect: SGD has no betas" in caplog.text


NEEDED = {
    "WarmupLR": {},
    "WarmupDecayLR": {"total_num_steps": 50},
    "WarmupCosineLR": {"total_num_steps": 50},
    "LRRangeTest": {},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5},
}


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("name", NEEDED)
def test_a_tensor_rate_is_filled_in_place(name, shape):
    rate = torch.full(shape, 0.5, dtype=torch.float64)
    tensor, number = (VALID_LR_SCHEDULES[name](optimizer(lr), **NEEDED[name]) for lr in (rate, 0.5))
    for _ in range(3):
        assert tensor.optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == number.optimizer.param_groups[0]["lr"]
        tensor.step(), number.step()


@pytest.mark.parametrize("name", NEEDED)
def test_the_configuration_has_the_settings_of_the_schedule(name):
    with pytest.raises(TypeError, match=f"{name}: its arguments are optimizer, "):
        VALID_LR_SCHEDULES[name](optimizer(), **NEEDED[name], warmup_steps=5)
    if NEEDED[name]:
        with pytest.raises(UsageError, match=f"is required by {name}"):
            VALID_LR_SCHEDULES[name](optimizer())


@pytest.mark.parametrize("name", NEEDED)
def test_a_restored_schedule_goes_on_where_it_was(name):
    def schedule():
        return VALID_LR_SCHEDULES[name](optimizer(kind=torch.optim.Adam), **NEEDED[name])

    whole, first, second = seen_over(schedule(), 20), schedule(), schedule()
    begun = seen_over(first, 8)
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr()
    assert second.optimizer.param_groups[0]["betas"] == first.optimizer.param_groups[0]["betas"]
    assert begun + seen_over(second, 12) == whole


@pytest.mark.parametrize(
    ("name", "settings", "top"),
    [("WarmupLR", {}, 0.5), ("WarmupDecayLR", {"total_num_steps": 5000}, 0.001)],
)
def test_defaults_differ_as_in_deepspeed(name, settings, top):
    section = load_config({"scheduler": {"type": name, "params": settings}}).scheduler
    scheduler = build_scheduler(section, optimizer(0.5))
    scheduler.step(1000)
    assert scheduler.get_last_lr() == [top]
