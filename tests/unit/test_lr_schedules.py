"""zero.optim.lr_schedules against DeepSpeed's closed formulas, written out here a second time."""

import math

import pytest
import torch

from zero.config import load_config
from zero.optim.lr_schedules import VALID_LR_SCHEDULES, WarmupDecayLR, WarmupLR, build_scheduler


def optimizer(*rates):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.5,)]
    return torch.optim.SGD(groups)


def rates_over(scheduler, steps):
    """The rate that each of the next ``steps`` optimizer steps sees in group 0."""
    seen = []
    for _ in range(steps):
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.step()
    return seen


def warmup(i, low, high, length, kind):
    """Rate of the i-th optimizer step (from 0), as long as it is in the warm-up."""
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


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_the_first_two_optimizer_steps_see_the_minimum(kind):
    assert rates_over(WarmupLR(optimizer(), 0.01, 0.1, 10, kind), 2) == [0.01, 0.01]


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
    with pytest.raises(ValueError, match="warmup_min_lr: 3 rates for 2 parameter groups"):
        WarmupLR(optimizer(0.5, 0.5), [0.1, 0.2, 0.3])


def test_a_restored_schedule_goes_on_where_it_was():
    whole = rates_over(WarmupDecayLR(optimizer(), 20, 0.0, 0.1, 5), 20)
    first = WarmupDecayLR(optimizer(), 20, 0.0, 0.1, 5)
    begun = rates_over(first, 8)
    second = WarmupDecayLR(optimizer(), 20, 0.0, 0.1, 5)
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr()
    assert begun + rates_over(second, 12) == whole


@pytest.mark.parametrize(("name", "extra"), [("WarmupLR", {}), ("WarmupDecayLR", {"total_num_steps": 25})])
def test_the_configuration_builds_the_schedule_it_names(name, extra):
    params = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear", **extra}
    built = build_scheduler(load_config({"scheduler": {"type": name, "params": params}}).scheduler, optimizer())
    direct = VALID_LR_SCHEDULES[name](optimizer(), **params)
    assert type(built).__name__ == name
    assert rates_over(built, 30) == rates_over(direct, 30)


def test_defaults_differ_as_in_deepspeed():
    for name, extra, top in (("WarmupLR", {}, 0.5), ("WarmupDecayLR", {"total_num_steps": 5000}, 0.001)):
        section = load_config({"scheduler": {"type": name, "params": extra}}).scheduler
        assert build_scheduler(section, optimizer(0.5)).max_lrs == [top]


def test_no_scheduler_section_means_no_schedule():
    assert build_scheduler(load_config({}).scheduler, optimizer()) is None


def test_an_unknown_type_or_parameter_is_an_error_of_the_configuration():
    with pytest.raises(ValueError, match="scheduler.type: expected one of 'WarmupLR' or 'WarmupDecayLR'"):
        load_config({"scheduler": {"type": "WarmupDecay"}})
    with pytest.raises(ValueError, match="did you mean scheduler.params.warmup_num_steps?"):
        load_config({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}})
