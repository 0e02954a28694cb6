"""Consolidated weights: they are right, only rank 0 has them, and saving takes the memory of two
groups.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import T5ForConditionalGeneration

import zero
from tests.dist.checkpoint.test_checkpoint_faults import lift_file_size_limit, limit_file_size
from tests.dist.toys import WIDTH, toy
from tests.dist.training import ds_config, split, start, step, train_zero, weights_of
from tests.parity.models import batches, build
from tests.parity.test_variants import variant
from tests.processes import run_on
from zero.checkpoint.export import copied_state_dict
from zero.checkpoint.models import consolidate, get_fp32_state_dict_from_zero_checkpoint
from zero.core.sharded_param import PlaceholderView
from zero.errors import UsageError


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


def test_a_copy_of_a_state_dict_keeps_ties_and_values():
    model = toy(tied=True)
    copies, expected = copied_state_dict(model.state_dict(), rank=0), weights_of(model)
    with torch.no_grad():
        model.stem.weight.zero_()
    assert list(copies) == list(expected) and all(
        torch.equal(copies[name], expected[name]) for name in expected
    )
    assert len({value.untyped_storage().data_ptr() for value in copies.values()}) == len(copies) - 1


def unfrozen(rank: int, world_size: int) -> tuple[set, set]:
    model = variant("frozen encoder")
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    engine, _ = start(model, ds_config(stage3_param_persistence_threshold=40))
    return frozen, set(
        engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True) or ()
    )


def test_frozen_parameters_can_be_left_out():
    (frozen, found), (_, other) = run_on(2, unfrozen)
    assert found == set(variant("frozen encoder").state_dict()) - frozen and frozen
    assert other == set()


class Wide(nn.Module):
    """Sixteen groups of 4 MB each in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1024, bias=False) for _ in range(16)])


def private_memory() -> int:
    """Return the bytes of this process's private writable memory.

    Memory-mapped files do not count.
    """
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData")
    )
    return int(line.split()[1]) * 1024


@contextmanager
def limited_memory(extra: int) -> Iterator[None]:
    """Limit private memory to `extra` bytes more than now.

    That is too little for a whole `Wide`.
    """
    former = resource.getrlimit(resource.RLIMIT_DATA)
    ctypes.CDLL(None).malloc_trim(0)  # so that malloc has no free memory in reserve
    resource.setrlimit(resource.RLIMIT_DATA, (private_memory() + extra, former[1]))
    try:
        with pytest.raises(OSError, match="allocate memory"):
            mmap.mmap(-1, 2**26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, former)


def within_two_groups(rank: int, world_size: int, folder: str) -> dict[str, float] | None:
    engine = zero.initialize(model=Wide(), config=ds_config(stage3_param_persistence_threshold=0))[
        0
    ]
    start(toy(), ds_config())[0].save_16bit_model(folder)  # makes threads and connections
    group = 4 * 1024**2
    # Two groups, and a shard of one if the dtype changes. The rest is for malloc's arenas and
    # messages.
    with limited_memory(2 * group + group // 2 + 16 * 2**20):
        engine.save_16bit_model(folder)
        engine.save_16bit_model(folder + "/bf16", save_dtype=torch.bfloat16)
        state = engine._zero3_consolidated_16bit_state_dict()
    return (
        None
        if state is None
        else {name: value.double().sum().item() for name, value in state.items()}
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the limit exists on Linux only")
def test_no_rank_needs_more_memory_than_two_groups(tmp_path):
    sums, other = run_on(2, within_two_groups, str(tmp_path))
    torch.manual_seed(0)  # as run_on does
    expected = {name: value.double().sum().item() for name, value in Wide().state_dict().items()}
    assert sums == expected and other is None
    assert {
        name: value.double().sum().item()
        for name, value in load_file(tmp_path / "model.safetensors").items()
    } == sums
    assert (
        load_file(tmp_path / "bf16" / "model.safetensors")["layers.3.weight"].dtype
        == torch.bfloat16
    )


def saving(rank: int, world_size: int, folder: str, allowed: bool) -> tuple[bool, dict | None]:
    engine, _ = start(toy(), ds_config(stage3_gather_16bit_weights_on_model_save=allowed))
    assert engine.zero_gather_16bit_weights_on_model_save() is allowed
    # OpenRLHF asks for the weights itself, whatever the setting.
    weights = engine._consolidated_16bit_state_dict()
    return engine.save_16bit_model(folder, "weights.safetensors"), weights


def test_saving_needs_the_setting(tmp_path):
    path = Path(tmp_path) / "new" / "weights.safetensors"
    (saved, weights), (saved_on_1, none) = run_on(2, saving, str(path.parent), False)
    assert not (saved or saved_on_1 or path.exists()) and weights and none is None
    assert all(saved for saved, _ in run_on(2, saving, str(path.parent), True))
    expected = weights_of(toy())
    for found in (weights, load_file(path)):
        assert found.keys() == expected.keys() and all(
            torch.equal(found[name], expected[name]) for name in expected
        )


MODES = {
    "as trained": (3, None),
    "fp16": (3, torch.float16),
    "stage 2": (2, torch.float32),
    "one file": (1, torch.bfloat16),
}


def save_t5(rank: int, world_size: int, folder: str) -> None:
    """Save into the same folders twice.

    Files of the earlier save, with other file sizes, must be gone.
    """
    for name, (stage, dtype) in MODES.items():
        engine, _ = start(build("t5"), ds_config(bf16={"enabled": True}, stage=stage))
        train_zero(engine, batches("t5", 2))
        for max_file_bytes in (10_000, 10**9 if name == "one file" else 20_000):
            engine.save_16bit_model(
                Path(folder) / name, save_dtype=dtype, max_file_bytes=max_file_bytes
            )
        engine.save_checkpoint(Path(folder) / name / "checkpoint")
    with pytest.raises(UsageError, match="'bf16': give one such as torch.bfloat16"):
        engine.save_16bit_model(folder, save_dtype="bf16")


def test_saved_models_load_with_from_pretrained(tmp_path):
    run_on(2, save_t5, str(tmp_path))
    for name, (_, dtype) in MODES.items():
        folder = tmp_path / name
        files = sorted(path.name for path in folder.glob("*.*"))
        assert (
            len(files) > 4 if name != "one file" else files == ["config.json", "model.safetensors"]
        )
        model, report = T5ForConditionalGeneration.from_pretrained(
            folder, dtype="auto", output_loading_info=True
        )
        assert not any(
            report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )
        masters = get_fp32_state_dict_from_zero_checkpoint(folder / "checkpoint")
        expected = dtype or torch.bfloat16
        assert model.dtype == expected
        for (
            key,
            value,
        ) in model.state_dict().items():  # transformers keeps some weights of an fp16 T5 in fp32
            assert torch.equal(value, masters[key].to(expected).to(value.dtype)), (name, key)


def save_to_a_full_disk(rank: int, world_size: int, folder: str) -> str:
    engine, _ = start(build("t5"), ds_config())
    limit_file_size(1 - rank)
    try:
        with pytest.raises(OSError) as caught:
            engine.save_16bit_model(folder)
    finally:
        lift_file_size_limit()
    engine.save_16bit_model(folder)  # all ranks are still in step
    return str(caught.value)


def test_a_full_disk_is_an_error_on_every_rank_and_leaves_nothing(tmp_path):
    first, second = run_on(2, save_to_a_full_disk, str(tmp_path))
    assert first == second and "rank 0" in first and "File too large" in first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def saved_without_a_state_dict(rank: int, world_size: int, folder: str) -> tuple[dict, list[bool]]:
    """Save as sentence-transformers does: all ranks gather the weights, then all save a module of
    the model.
    """
    model = build("t5")
    engine, _ = start(model, ds_config(stage3_param_persistence_threshold=40))
    with pytest.raises(
        UsageError, match=r"would read the values .*get_state_dict\(engine\)\), on all ranks"
    ):
        engine.save_pretrained(folder)
    train_zero(engine, batches("t5", 1))
    gathered = engine._zero3_consolidated_16bit_state_dict()  # kept while the model is saved
    model.save_pretrained(folder)
    inner = dict(model.encoder.state_dict())
    gathered = {name: value.clone() for name, value in gathered.items()} if rank == 0 else gathered
    shown = [inner["embed_tokens.weight"].is_meta]
    del inner
    shown.append(rank == 0 and isinstance(model.state_dict()["shared.weight"], PlaceholderView))
    (batch,) = batches("t5", 1)
    step(engine, split(batch, world_size)[rank::world_size])
    shown.append(isinstance(model.state_dict()["shared.weight"], PlaceholderView))
    return gathered, shown


def test_state_dict_has_what_was_gathered_until_it_is_let_go_or_stale(tmp_path):
    (expected, first), (_, second) = run_on(2, saved_without_a_state_dict, str(tmp_path))
    saved = T5ForConditionalGeneration.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    assert first == [False, True, True] and second == [True, False, True]


class WithValueHead(nn.Module):
    """Its state dict has other names than its parameters, as that of TRL's
    `AutoModelForCausalLMWithValueHead` does.
    """

    def __init__(self, keeps_vars: bool):
        super().__init__()
        self.pretrained_model = toy(tied=True)
        self.v_head = nn.Linear(WIDTH, 1)
        self._keeps_vars = keeps_vars

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.pretrained_model(x, y) + self.v_head(x).square().mean()

    def state_dict(self, *args, **kwargs):
        state = self.pretrained_model.state_dict(*args, **kwargs)
        for name, value in self.v_head.state_dict(*args, **kwargs).items():
            state[f"v_head.{name}"] = value if self._keeps_vars else value.detach()
        return state


def with_value_head(keeps_vars: bool = True) -> WithValueHead:
    torch.manual_seed(3)
    return WithValueHead(keeps_vars)


def saved_with_a_value_head(rank: int, world_size: int, folder: Path, stage: int) -> dict:
    model = with_value_head()
    engine, _ = start(model, ds_config(stage=stage, stage3_param_persistence_threshold=40))
    assert engine.save_16bit_model(folder / "saved")
    engine.save_checkpoint(folder / "checkpoint")
    found = engine._zero3_consolidated_16bit_state_dict() or {}
    resumed, _ = start(with_value_head(), ds_config(stage=stage))
    with zero.GatheredParameters(resumed.module.v_head.weight, modifier_rank=0):
        resumed.module.v_head.weight.data.zero_()
    resumed.load_checkpoint(folder / "checkpoint")
    with zero.GatheredParameters(resumed.module.v_head.weight):
        assert resumed.module.v_head.weight.any()
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_is_saved_under_the_names_of_its_own_state_dict(stage, tmp_path):
    expected = dict(with_value_head().state_dict())
    gathered, _ = run_on(2, saved_with_a_value_head, tmp_path, stage)
    whole = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "checkpoint")
    for found in (gathered, whole):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    consolidate(tmp_path / "checkpoint", tmp_path / "consolidated")
    del expected["head.weight"]  # the same as stem.weight
    for folder in ("saved", "consolidated"):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert found.keys() == expected.keys(), folder
        assert all(torch.equal(found[name], value) for name, value in expected.items()), folder


def saved_without_values(rank: int, world_size: int, folder: Path) -> None:
    engine, _ = start(
        with_value_head(keeps_vars=False), ds_config(stage=3, stage3_param_persistence_threshold=0)
    )
    for save in (engine.save_16bit_model, engine.save_checkpoint):
        with pytest.raises(UsageError, match=r"'v_head.weight' without values"):
            save(folder)


def test_a_state_dict_without_values_is_an_error(tmp_path):
    run_on(2, saved_without_values, tmp_path)
