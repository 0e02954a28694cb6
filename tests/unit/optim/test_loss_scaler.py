"""zero.optim.loss_scaler: the sequences of scales that DeepSpeed's DynamicLossScaler gives."""

import pytest

from zero.config import FP16Config, load_config
from zero.optim.loss_scaler import LossScaler


def scaler_of(power=16, window=1000, hysteresis=2, **others):
    settings = {"initial_scale_power": power, "loss_scale_window": window, "hysteresis": hysteresis}
    return LossScaler(FP16Config(**settings, **others))


def scales(scaler, events):
    """Return the scale after each optimizer step.

    In `events`, "x" is an overflow and "." a good step.
    """
    seen = []
    for event in events:
        scaler.update(event == "x")
        seen.append(scaler.scale)
    return seen


# Settings, events, and the scale after each.
SEQUENCES = [
    # Two spend the first overflow, and halve on every later one; one halves at once.
    ({"hysteresis": 2}, "xx.x.x", [16, 8, 8, 4, 4, 2]),
    ({"hysteresis": 1}, "x.x", [8, 8, 4]),
    # A good step refills them.
    ({"consecutive_hysteresis": True}, "x.x.xx", [16, 16, 16, 16, 16, 8]),
    # The window starts after the first good step of a run, and after the first good step after an
    # overflow.
    ({"hysteresis": 1, "window": 3}, ".......", [16, 16, 16, 32, 32, 32, 64]),
    ({"hysteresis": 1, "window": 3}, "x.....", [8, 8, 8, 8, 16, 16]),
    # Doubling refills the hysteresis.
    ({"window": 2}, "xx...xx", [16, 8, 8, 8, 16, 16, 8]),
    ({"loss_scale": 128.0}, "xxxxx...x", [128.0] * 9),
]


@pytest.mark.parametrize(("settings", "events", "expected"), SEQUENCES)
def test_the_sequence_of_scales_is_deepspeeds(settings, events, expected):
    scaler = scaler_of(**{"power": 4} | settings)
    assert scales(scaler, events) == expected and not scaler.exhausted


def test_the_minimum_is_the_end_unless_good_steps_lead_away_from_it():
    scaler = scaler_of(power=2, hysteresis=1, min_loss_scale=3)
    assert scales(scaler, "x") == [3] and scaler.at_minimum
    scaler = scaler_of(power=1, min_loss_scale=2)
    assert scaler.at_minimum and not scaler.exhausted
    scaler.update(True)
    assert scaler.exhausted
    scaler = scaler_of(power=0, window=2, hysteresis=1)
    assert scaler.exhausted
    assert scales(scaler, "...") == [1, 1, 2] and not scaler.exhausted


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_a_restored_scaler_goes_on_where_it_was(hysteresis):
    events = "x..x....xx...........x..x"
    whole = scales(scaler_of(8, 3, hysteresis), events)
    for cut in range(len(events)):
        first, second = scaler_of(8, 3, hysteresis), scaler_of(8, 3, hysteresis)
        begun = scales(first, events[:cut])
        second.load_state_dict(first.state_dict())
        assert begun + scales(second, events[cut:]) == whole


@pytest.mark.parametrize(("stage", "expected"), [(1, [2**16, 2**15]), (0, [2**15, 2**14])])
def test_defaults_are_deepspeeds(stage, expected):
    """At stage 0, it halves at each overflow."""
    config = load_config({"fp16": {"enabled": True}, "zero_optimization": {"stage": stage}})
    assert scales(LossScaler(config.fp16), "xx") == expected
