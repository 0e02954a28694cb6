"""zero.config: accepted input, batch arithmetic, and keys without effect."""

import base64
import copy
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.unit.configurations import all_keys, errors, optimizer, zero3
from zero.config import Config, load_config
from zero.config.load import section_of
from zero.config.optim import OptimizerParams
from zero.config.table import report

PACKAGE = Path(__file__).parents[3] / "zero"
SHIPPED = Path(__file__).parents[3] / "configs" / "ds_config_zero3.json"


def without_effect(raw):
    """Return the given keys that have no effect, according to the table that is printed at the
    start.
    """
    lines = report(load_config(raw, allow_auto=True)).splitlines()
    rows = [line.split() for line in lines if " none: " in line]
    return sorted(row[0] for row in rows if "configuration" in row)


# ---- sources


def test_file_dict_json_and_base64_give_the_same_settings(tmp_path):
    raw = {"gradient_clipping": 0.5, **zero3(sub_group_size=1e6)}
    text = json.dumps(raw)
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    dumps = [load_config(source).model_dump() for source in (path, str(path), raw, text, encoded)]
    assert all(dump == dumps[0] for dump in dumps)
    assert dumps[0]["zero_optimization"]["sub_group_size"] == 1_000_000


def test_hjson_is_read_where_it_is_installed(monkeypatch):
    text, found = "{gradient_clipping: 0.5}", [("gradient_clipping", 0.5)]
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ValueError, match="line 1, column 2: not valid JSON"):
        load_config(text)
    hjson = SimpleNamespace(loads=lambda text, object_pairs_hook: object_pairs_hook(found))
    monkeypatch.setitem(sys.modules, "hjson", hjson)
    assert load_config(text).gradient_clipping == 0.5


def test_the_users_dict_is_kept_and_left_unchanged():
    raw = {"bfloat16": {"enabled": True}, "train_batch_size": "auto", **zero3(cpu_offload=True)}
    before = copy.deepcopy(raw)
    config = load_config(raw, allow_auto=True)
    assert config.origin.raw is raw and raw == before


@pytest.mark.parametrize("name", ["missing.json", "missing", "bm9uZQ=="])
def test_a_missing_file_is_named(name):
    with pytest.raises(ValueError, match=f"^{name}: cannot read .*No such file"):
        load_config(name)


def test_every_key_of_the_shipped_file_has_an_effect():
    """fp16.enabled is "auto". The other keys of fp16 act only with it."""
    assert [key for key in without_effect(SHIPPED) if not key.startswith("fp16.")] == []
    config = load_config(SHIPPED, allow_auto=True)
    assert config.origin.renamed == [] and len(config.origin.auto) == 16


# ---- "auto"


def test_auto_without_a_trainer_is_the_default_in_every_key_that_deepspeed_drops():
    """OpenRLHF writes such a section, and calls `initialize` itself."""
    keys = (
        "sub_group_size stage3_max_live_parameters stage3_max_reuse_distance offload_param "
        "stage3_param_persistence_threshold stage3_prefetch_bucket_size reduce_bucket_size"
    ).split()
    offload = {"device": "cpu", "ratio": "auto"}
    raw = {
        "gradient_clipping": "auto",
        "bf16": {"enabled": True, "check_grad_overflow": "auto"},
        **optimizer("adamw", lr="auto", betas="auto", eps="auto", weight_decay="auto"),
        **zero3(**dict.fromkeys(keys, "auto"), offload_optimizer=offload),
    }
    config, default = load_config(raw), load_config(zero3())
    for key in keys:
        assert getattr(config.zero_optimization, key) == getattr(default.zero_optimization, key)
    assert config.gradient_clipping == config.zero_optimization.offload_optimizer.ratio == 1.0
    assert dict(**config.optimizer.params) == {}, "left to test_optimizer_factory.py"
    assert "zero_optimization.reduce_bucket_size" in config.origin.auto


def test_auto_without_a_default_is_an_error_unless_it_will_be_filled_in():
    raw = {
        "zero_optimization": {"stage": "auto", "offload_param": {"device": "cpu"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    }
    first, second = errors(raw)
    assert first.startswith("zero_optimization.stage:")
    assert second.startswith("scheduler.params.total_num_steps:")
    load_config(raw, allow_auto=True)


# ---- batch sizes


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ((24, 4, 2), (24, 4, 2)),
        ((24, 4, None), (24, 4, 2)),
        ((24, None, 2), (24, 4, 2)),
        ((None, 4, 2), (24, 4, 2)),
        ((24, None, None), (24, 8, 1)),
        ((None, 4, None), (12, 4, 1)),
    ],
)
def test_missing_batch_sizes_follow_from_the_others(given, resolved):
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = load_config(
        {key: value for key, value in zip(keys, given, strict=True) if value is not None}
    )
    assert tuple(getattr(config.resolve(3), key) for key in keys) == resolved
    assert tuple(getattr(config, key) for key in keys) == given


GIVEN = {
    "train_batch_size": 6, "train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (GIVEN, "6 is not train_micro_batch_size_per_gpu 6 x gradient_accumulation_steps 1 x"),
        (GIVEN | {"gradient_accumulation_steps": None}, "multiple of train_micro_batch_size_per_g"),
        ({"train_batch_size": 1}, "train_batch_size: 1 is not a whole multiple of world size 2"),
        ({"gradient_accumulation_steps": 4}, "train_micro_batch_size_per_gpu: is missing, and tra"),
        ({"train_micro_batch_size_per_gpu": "auto"}, "is still 'auto', .* set one of them to"),
        ({"train_batch_size": 6, "data_parallel_size": 6}, "data_parallel_size: is 6, and the num"),
    ],
)
def test_batch_sizes_that_do_not_multiply_out(raw, message):
    with pytest.raises(ValueError, match=message):
        load_config(raw).resolve(2)


# ---- settings


def test_defaults_are_deepspeeds():
    config = Config()
    zero = config.zero_optimization
    assert config.gradient_clipping == 1.0 and config.steps_per_print is None
    assert config.zero_force_ds_cpu_optimizer
    assert (zero.stage, zero.contiguous_gradients, zero.overlap_comm) == (0, True, False)
    assert load_config(zero3()).zero_optimization.overlap_comm is True
    assert (zero.reduce_bucket_size, zero.sub_group_size) == (5e8, 1e9)
    assert (zero.stage3_prefetch_bucket_size, zero.stage3_param_persistence_threshold) == (5e7, 1e5)
    assert (zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance) == (1e9, 1e9)
    fp16 = config.fp16
    assert (fp16.initial_scale_power, fp16.hysteresis, fp16.loss_scale_window) == (16, 1, 1000)
    assert load_config(zero3()).fp16.hysteresis == 2


def test_dtype_names():
    names = {"communication_data_type": "FP32", "data_types": {"grad_accum_dtype": "bfloat16"}}
    config = load_config(names)
    assert (config.message_dtype, config.sum_dtype) == (torch.float32, torch.bfloat16)
    assert load_config({"communication_data_type": None}).communication_data_type is None


def test_parameters_of_an_optimizer_are_what_the_user_set_and_has_an_effect():
    params = {"lr": 0.1, "betas": (0.5, 0.6), "fused": None, "bias_correction": True}
    config = load_config(optimizer("adam", **params | {"betas": [0.5, 0.6]}, set_grad_none=False))
    assert config.optimizer.type == "Adam" and dict(**config.optimizer.params) == params
    assert without_effect(config.origin.raw) == ["optimizer.params.set_grad_none"]


def test_old_names_act_as_the_new_ones_and_are_reported():
    gathers = {"stage3_gather_fp16_weights_on_model_save": True}
    config = load_config(zero3(cpu_offload=True, cpu_offload_param=False, **gathers))
    zero = config.zero_optimization
    assert zero.offloads_optimizer and not zero.offloads_params
    assert zero.stage3_gather_16bit_weights_on_model_save
    old, new = "zero_optimization.cpu_offload", "zero_optimization.offload_optimizer"
    assert (old, new) in config.origin.renamed
    assert len(config.origin.renamed) == 3


# ---- keys without effect


def test_keys_without_effect_are_listed_by_name():
    idle = {
        "activation_checkpointing.partition_activations": True,
        "aio.block_size": 1e6,
        "disable_allgather": True,
        "timers.throughput.enabled": True,
        "timers.throughput.synchronized": True,
        "zero_optimization.allgather_bucket_size": 5e8,
        "zero_optimization.offload_optimizer.pipeline_read": True,
        "zero_optimization.round_robin_gradients": True,
    }
    acting = {"gradient_clipping": 1.0, **zero3(offload_optimizer={"device": "cpu"})}
    assert without_effect(idle | acting) == list(idle)
    assert without_effect(zero3()) == []


def test_every_key_without_a_mark_is_read_by_the_engine():
    # These act elsewhere: in zero.config itself, in accelerate, which reads the dict, and in torch.
    read_elsewhere = {
        *("train_batch_size", "train_micro_batch_size_per_gpu", "data_parallel_size"),
        *("zero_hpz_partition_size", "zero_force_ds_cpu_optimizer", "communication_data_type"),
        *("grad_accum_dtype", "bf16_master_weights_and_grads", *OptimizerParams.model_fields),
    }
    sources = [path.read_text() for path in PACKAGE.rglob("*.py") if path.parent.name != "config"]
    words = set(re.findall(r"\w+", "\n".join(sources)))
    acting = {
        key
        for section, key in all_keys()
        if not section.about(key).get("idle") and section_of(section, key) is None
    }
    assert len(acting) > 30
    assert acting - read_elsewhere - words == set()


def test_every_key_says_what_it_does_or_why_it_does_nothing():
    idle = 0
    for section, key in all_keys():
        inner, text = section_of(section, key), section.describe(key)[0]
        if section.about(key).get("idle"):
            idle += 1
        else:
            assert inner.__doc__ if inner else text, f"{section.__name__}.{key}"
    assert idle > 200


def test_bits_of_compressed_gradients_act_only_with_compression():
    section = {"zero_quantized_gradients": True, "zero_quantized_gradient_bits": 4}
    zero = load_config({"zero_optimization": section}).zero_optimization
    assert zero.why_idle("zero_quantized_gradient_bits") is None
    assert zero.why_idle("zero_quantized_weights") == "needs stage 3, and this is stage 0"
    assert load_config({}).zero_optimization.why_idle("zero_quantized_gradient_bits")
