"""Experts in slices on the simulated accelerator: no mistake is found, and the numbers are the
CPU's.
"""

from __future__ import annotations

from tests.accelerator import device
from tests.dist.training import Curve, curve_on, ds_config, relative, start, train_zero
from tests.parity.test_experts import EXPERTS_NUMEL, WHOLE, build, data


def sliced(rank: int, world_size: int, place: str) -> Curve:
    settings = {
        "stage3_max_live_parameters": EXPERTS_NUMEL // 2,
        "offload_param": {"device": "cpu"},
    }
    model = build("mixtral", "eager").to(place)
    engine, _ = start(model, ds_config(**WHOLE, **settings))
    assert len(engine._sliced) == 2 and engine.comm.device.type == place
    batches = [{name: value.to(place) for name, value in batch.items()} for batch in data()]
    curve = train_zero(engine, batches)
    curve.weights = {}
    engine.destroy()
    return curve


def test_experts_in_slices_have_the_numbers_of_gloo():
    found, expected = curve_on(2, sliced, device.NAME, simulated=True), curve_on(2, sliced, "cpu")
    assert relative(found.mean_losses(), expected.mean_losses()) < 1e-6
    assert relative(found.norms, expected.norms) < 1e-6
