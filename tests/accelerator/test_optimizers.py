"""bf16 without masters and schedule-free optimizers on the simulated accelerator: free of mistakes,
equal numbers.
"""

from __future__ import annotations

import pytest

from tests.dist.optim import test_moments as coded
from tests.dist.optim import test_schedule_free as free
from tests.dist.optim import test_without_masters as bf16
from tests.dist.training import assert_same_weights, relative
from tests.processes import run_on

WHERE = {
    "on the device": {},
    "offloaded": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
}
HALF = {
    "offload_optimizer": {"device": "cpu", "ratio": 0.5},
    "stage3_param_persistence_threshold": 0,
}


# In the last case a half of the state is on the device.
@pytest.mark.parametrize(
    ("name", "states", "where"),
    [
        ("AdamW", True, WHERE["offloaded"]),
        ("Adafactor", False, WHERE["on the device"]),
        ("AdamW", True, HALF),
    ],
)
def test_bf16_without_masters(name, states, where, tmp_path):
    found, expected = (
        run_on(
            ranks, bf16.trained, name, states, where, str(tmp_path / str(ranks)), simulated=True
        )[0]
        for ranks in (2, 1)
    )
    assert_same_weights(found, expected)


@pytest.mark.parametrize("where", WHERE)
def test_schedule_free(where, tmp_path):
    free.compare(
        run_on(2, free.sharded, "AdamW", WHERE[where], str(tmp_path), simulated=True)[0], "AdamW"
    )


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_8_bit_moments_train_on_the_device_and_in_host_memory(ratio):
    sections = coded.CODED | {
        "offload_optimizer": {"device": "cpu", "ratio": ratio},
        "stage3_param_persistence_threshold": 0,
    }
    expected, found = (
        run_on(2, coded.trained, sections, 8, simulated=simulated)[0] for simulated in (False, True)
    )
    assert relative(found[0], expected[0]) < 1e-3
