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
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)


def optimizer(*rates, kind=torch.optim.SGD):
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.5,)
    ]
    return kind(groups)


def rates_over(scheduler, steps):
    """Return the learning rate of group 0 in each of the next `steps` optimizer steps."""
    seen = []
    for _ in range(steps):
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.step()
    return seen


def warmup(i, low, high, length, kind):
    """Return the learning rate of optimizer step `i` (from 0) of the warm-up."""
    if i == 0:
        return low
    share = math.log(i) / math.log(length) if kind == "log" else (i - 1) / length
    return low + (high - low) * share


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_over_30_steps(kind):
    scheduler = WarmupLR(optimizer(), 0.01, 0.1, 10, kind)
    expected = [warmup(i, 0.01, 0.1, 10, kind) if i <= 10 else 0.1 for i in range(30)]
    assert rates_over(scheduler, 30) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_and_decay_over_30_steps(kind):
    scheduler = WarmupDecayLR(optimizer(), 25, 0.01, 0.1, 10, kind)
    decay = [0.01 + 0.09 * max(0, 25 - (i - 1)) / 15 for i in range(30)]
    expected = [warmup(i, 0.01, 0.1, 10, kind) if i <= 10 else decay[i] for i in range(30)]
    seen = rates_over(scheduler, 30)
    assert seen == pytest.approx(expected, rel=1e-12)
    assert seen[26:] == [0.01] * 4


@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_warmup_shorter_than_two_steps_acts_as_two(length):
    assert rates_over(WarmupLR(optimizer(), 0.0, 0.1, length), 5) == [0.0, 0.0, 0.1, 0.1, 0.1]


def test_by_default_each_group_warms_up_to_its_own_rate():
    scheduler = WarmupLR(optimizer(0.5, 0.25), warmup_num_steps=2)
    for _ in range(4):
        scheduler.step()
    assert scheduler.get_last_lr() == [0.5, 0.25]


def test_a_list_of_rates_needs_one_for_each_group():
    assert WarmupLR(optimizer(0.5, 0.5), [0.1, 0.2]).get_last_lr() == [0.1, 0.2]
    with pytest.raises(ValueError, match="warmup_min_lr: 3 values for 2 parameter groups"):
        WarmupLR(optimizer(0.5, 0.5), [0.1, 0.2, 0.3])


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_cosine_over_30_steps(kind):
    scheduler = WarmupCosineLR(optimizer(0.5), 25, 0.2, 10, 0.1, kind)
    ratio = [0, *(warmup(i, 0.2, 1.0, 10, kind) for i in range(1, 11))]
    ratio += [0.55 + 0.45 * math.cos(math.pi * min(i - 10, 15) / 15) for i in range(11, 30)]
    assert rates_over(scheduler, 30) == pytest.approx([0.5 * value for value in ratio], rel=1e-12)
    assert scheduler.get_lr() == pytest.approx([0.05])


def test_a_cosine_without_room_after_the_warmup_stays_at_its_end():
    scheduler = WarmupCosineLR(optimizer(0.5), 10, warmup_num_steps=10, cos_min_ratio=0.1)
    assert rates_over(scheduler, 15)[11:] == pytest.approx([0.05] * 4)


def test_cosine_scales_the_rate_of_each_group():
    scheduler = WarmupCosineLR(optimizer(0.5, 0.25), 100, warmup_num_steps=2)
    assert (scheduler.get_lr_ratio(), scheduler.warmup_num_steps) == (0.0, 2)
    scheduler.step(1)
    assert scheduler.get_lr_ratio() == 1.0 and scheduler.max_lrs == [0.5, 0.25]
    assert scheduler.get_last_lr() == pytest.approx([0.5, 0.25])


def test_range_test_rises_in_a_line_or_in_stairs():
    line = LRRangeTest(optimizer(), 0.1, 3, 2.0)
    assert rates_over(line, 7) == pytest.approx([0.1 + 0.2 * i / 3 for i in range(7)], rel=1e-12)
    stairs = LRRangeTest(optimizer(), 0.1, 3, 2.0, True)
    assert rates_over(stairs, 7) == pytest.approx([0.1] * 3 + [0.3] * 3 + [0.5], rel=1e-12)


def test_one_cycle_goes_up_and_down_and_decays():
    steps = {"cycle_first_step_size": 4, "cycle_second_step_size": 2, "decay_step_size": 2}
    scheduler = OneCycle(optimizer(), 0.1, 0.5, 0.5, **steps)
    cycle = [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1]
    assert rates_over(scheduler, 10) == pytest.approx(
        [*cycle, *(0.1 / (1 + 0.5 * i / 2) for i in (1, 2, 3))], rel=1e-12
    )


def test_one_cycle_without_decay_stays_at_the_bottom():
    scheduler = OneCycle(optimizer(), 0.1, 0.5, decay_lr_rate=0.5, cycle_first_step_size=2)
    assert rates_over(scheduler, 7) == pytest.approx([0.1, 0.3, 0.5, 0.3, 0.1, 0.1, 0.1], rel=1e-12)


def test_one_cycle_in_stairs():
    steps = {"cycle_first_step_size": 6, "cycle_second_step_size": 3}
    stairs = {"cycle_first_stair_count": 2, "cycle_second_stair_count": 1}
    scheduler = OneCycle(optimizer(), 0, 1, **steps, **stairs)
    assert rates_over(scheduler, 9) == [0, 0, 0, 0.5, 0.5, 0.5, 1, 0, 0]


def momenta_over(scheduler, steps):
    """Return the `betas` of each group in each of the next `steps` optimizer steps."""
    seen = []
    for _ in range(steps):
        seen.append([group["betas"] for group in scheduler.optimizer.param_groups])
        scheduler.step()
    return seen


def test_one_cycle_moves_the_momentum_against_the_rate():
    scheduler = OneCycle(
        optimizer(1.0, 2.0, kind=torch.optim.Adam), 0.1, 0.5, decay_mom_rate=0.01,
        cycle_first_step_size=2, decay_step_size=1, cycle_min_mom=[0.5, 0.6], cycle_max_mom=0.9,
    )  # fmt: skip
    seen = momenta_over(scheduler, 6)
    first = [0.5, 0.7, 0.5, 0.7, 0.9, 0.9 * 1.01]
    second = [0.6, 0.75, 0.6, 0.75, 0.9, 0.9 * 1.01]
    for group, expected in enumerate((first, second)):
        assert [step[group][0] for step in seen] == pytest.approx(expected, rel=1e-12)
        assert {step[group][1] for step in seen} == {0.99}
    assert [mom for mom, _ in scheduler.get_mom()] == pytest.approx([0.9 * 1.02] * 2, rel=1e-12)


def test_one_cycle_leaves_the_momentum_where_it_is_told_or_there_is_none(caplog):
    told = OneCycle(optimizer(kind=torch.optim.Adam), 0.1, 0.5, cycle_momentum=False)
    assert momenta_over(told, 2) == [[(0.9, 0.999)]] * 2
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


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmupLR", {"warmup_num_steps": -5}, ""),
        ("WarmupLR", {"warmup_type": "cosine"}, ": expected one of 'log' or 'linear', got"),
        ("WarmupCosineLR", {"warmup_num_steps": None}, ""),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, ""),
        ("OneCycle", {"cycle_first_step_size": 0}, ""),
        ("OneCycle", {"cycle_second_step_size": -1}, ""),
        ("OneCycle", {"cycle_max_mom": [0.9, 0.8]}, ": 2 values for 1 parameter groups"),
    ],
)
def test_impossible_settings_are_refused(name, params, message):
    (key,) = params
    with pytest.raises(ValueError, match=key + message):
        VALID_LR_SCHEDULES[name](optimizer(), **NEEDED[name] | params)


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

    whole, first, second = rates_over(schedule(), 20), schedule(), schedule()
    begun = rates_over(first, 8)
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr()
    assert second.optimizer.param_groups[0]["betas"] == first.optimizer.param_groups[0]["betas"]
    assert begun + rates_over(second, 12) == whole


def test_defaults_differ_as_in_deepspeed():
    for name, extra, top in (
        ("WarmupLR", {}, 0.5),
        ("WarmupDecayLR", {"total_num_steps": 5000}, 0.001),
    ):
        section = load_config({"scheduler": {"type": name, "params": extra}}).scheduler
        scheduler = build_scheduler(section, optimizer(0.5))
        scheduler.step(1000)
        assert scheduler.get_last_lr() == [top]
