"""zero.optim.loss_scaler: the sequences of scales that DeepSpeed's DynamicLossScaler gives."""

import pytest

from zero.config import FP16Config, load_config
from zero.optim.loss_scaler import LossScaler


def scaler_of(loss_scale=0, power=16, window=1000, hysteresis=2, **others):
    return LossScaler(
        FP16Config(
            loss_scale=loss_scale,
            initial_scale_power=power,
            loss_scale_window=window,
            hysteresis=hysteresis,
            **others,
        )
    )


def scales(scaler, events):
    """Return the scale after each optimizer step.

    In `events`, "x" is an overflow and "." a good step.
    """
    seen = []
    for event in events:
        scaler.update(event == "x")
        seen.append(scaler.scale)
    return seen


def test_hysteresis_two_spends_the_first_overflow_and_halves_on_every_later_one():
    assert scales(scaler_of(0, 4, 1000, hysteresis=2), "xx.x.x") == [16, 8, 8, 4, 4, 2]


def test_hysteresis_one_halves_at_once():
    assert scales(scaler_of(0, 4, 1000, hysteresis=1), "x.x") == [8, 8, 4]


def test_consecutive_hysteresis_is_refilled_by_a_good_step():
    scaler = scaler_of(0, 4, 1000, hysteresis=2, consecutive_hysteresis=True)
    assert scales(scaler, "x.x.xx") == [16, 16, 16, 16, 16, 8]


def test_the_scale_doubles_after_each_window_of_good_steps():
    # The window starts after the first good step of a run, and after the first good step after an
    # overflow.
    assert scales(scaler_of(0, 4, 3, hysteresis=1), ".......") == [16, 16, 16, 32, 32, 32, 64]
    assert scales(scaler_of(0, 4, 3, hysteresis=1), "x.....") == [8, 8, 8, 8, 16, 16]


def test_doubling_refills_the_hysteresis():
    assert scales(scaler_of(0, 4, 2, hysteresis=2), "xx...xx") == [16, 8, 8, 8, 16, 16, 8]


def test_the_scale_never_falls_below_the_minimum():
    scaler = scaler_of(0, 2, 1000, hysteresis=1, min_loss_scale=3)
    assert scales(scaler, "x") == [3] and scaler.at_minimum


def test_an_overflow_at_the_minimum_with_no_hysteresis_left_is_the_end():
    scaler = scaler_of(0, 1, 1000, hysteresis=2, min_loss_scale=2)
    assert scaler.at_minimum and not scaler.exhausted
    scaler.update(True)
    assert scaler.exhausted


def test_good_steps_at_the_minimum_lead_away_from_it():
    scaler = scaler_of(0, 0, 2, hysteresis=1)
    assert scaler.exhausted
    assert scales(scaler, "...") == [1, 1, 2] and not scaler.exhausted


def test_a_static_scale_never_changes_and_never_raises():
    scaler = scaler_of(128.0)
    assert scales(scaler, "xxxxx...x") == [128.0] * 9
    assert not scaler.dynamic and not scaler.at_minimum and not scaler.exhausted


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_a_restored_scaler_goes_on_where_it_was(hysteresis):
    events = "x..x....xx...........x..x"
    whole = scales(scaler_of(0, 8, 3, hysteresis), events)
    for cut in range(len(events)):
        first, second = scaler_of(0, 8, 3, hysteresis), scaler_of(0, 8, 3, hysteresis)
        begun = scales(first, events[:cut])
        second.load_state_dict(first.state_dict())
        assert begun + scales(second, events[cut:]) == whole


@pytest.mark.parametrize(("stage", "expected"), [(1, [2**16, 2**15]), (0, [2**15, 2**14])])
def test_defaults_are_deepspeeds(stage, expected):
    """At stage 0, it halves at each overflow."""
    config = load_config({"fp16": {"enabled": True}, "zero_optimization": {"stage": stage}})
    assert scales(LossScaler(config.fp16), "xx") == expected
