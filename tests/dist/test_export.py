"""Consolidated weights: right, on rank 0 alone, one unit at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.dist.pool import run_on
from tests.dist.toys import BLOCK, after_each, gathered, toy, toy_batches
from tests.dist.training import ds_config, start, train_zero, weights_of
from tests.parity.test_variants import variant
from zero.unit import Unit


def consolidated(rank: int, world_size: int, kind: str, sections: dict) -> dict | None:
    engine, _ = start(variant(kind), ds_config(stage3_param_persistence_threshold=40, **sections))
    return engine._zero3_consolidated_16bit_state_dict()


def test_values_names_and_order_are_those_of_the_plain_model():
    for kind in ("plain", "frozen encoder", "untied", "several dtypes"):
        expected = variant(kind).state_dict()
        first, *others = run_on(3, consolidated, kind, {})
        assert others == [None, None]
        assert list(first) == list(expected)
        for name, value in expected.items():
            assert first[name].dtype == value.dtype and torch.equal(first[name], value), name


def test_values_have_the_dtype_of_training():
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found = run_on(2, consolidated, "plain", {section: {"enabled": True}})[0]
        expected = variant("plain").state_dict()
        assert all(torch.equal(found[name], value.to(dtype)) for name, value in expected.items())


def tied(rank: int, world_size: int) -> tuple[bool, bool] | None:
    engine, _ = start(toy(tied=True), ds_config())
    found = engine._zero3_consolidated_16bit_state_dict()
    if found is None:
        return None
    same = found["head.weight"].data_ptr() == found["stem.weight"].data_ptr()
    apart = len({value.untyped_storage().data_ptr() for value in found.values()}) == len(found) - 1
    return same, apart


def test_tied_parameters_are_one_tensor_and_others_have_memory_of_their_own():
    assert run_on(2, tied) == [(True, True), None]


def unfrozen(rank: int, world_size: int) -> tuple[set, set]:
    model = variant("frozen encoder")
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    engine, _ = start(model, ds_config(stage3_param_persistence_threshold=40))
    return frozen, set(engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True) or ())


def test_frozen_parameters_can_be_left_out():
    (frozen, found), (_, other) = run_on(2, unfrozen)
    assert found == set(variant("frozen encoder").state_dict()) - frozen and frozen
    assert other == set()


def peak(rank: int, world_size: int) -> tuple[int, int]:
    engine, _ = start(toy(), ds_config(stage3_param_persistence_threshold=0))
    train_zero(engine, toy_batches(1))
    seen = []
    with after_each(Unit, "fetch", lambda _: seen.append(gathered(engine))):
        engine._zero3_consolidated_16bit_state_dict()
    return max(seen), gathered(engine)


def test_one_unit_is_gathered_at_a_time():
    for most, left in run_on(2, peak):
        assert most < 2 * BLOCK and left == 0


def saving(rank: int, world_size: int, folder: str, allowed: bool) -> tuple[bool, str]:
    engine, _ = start(toy(), ds_config(stage3_gather_16bit_weights_on_model_save=allowed))
    assert engine.zero_gather_16bit_weights_on_model_save() is allowed
    try:
        engine._zero3_consolidated_16bit_state_dict()
        message = ""
    except ValueError as error:
        message = str(error)
    return engine.save_16bit_model(folder, "weights.bin"), message


def test_saving_needs_the_setting(tmp_path):
    path = Path(tmp_path) / "new" / "weights.bin"
    for saved, message in run_on(2, saving, str(path.parent), False):
        assert not saved and "stage3_gather_16bit_weights_on_model_save" in message
    assert not path.exists()
    assert run_on(2, saving, str(path.parent), True) == [(True, "")] * 2
    found, expected = torch.load(path), weights_of(toy())
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
