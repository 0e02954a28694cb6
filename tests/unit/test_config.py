"""zero.config: what is accepted, what each message says, the batch arithmetic, and the keys without effect."""

import base64
import copy
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from zero.config import Config, load_config
from zero.config.keys import IdleSection, Section
from zero.config.optim import OptimizerParams
from zero.config.reading import section_of
from zero.config.report import report

PACKAGE = Path(__file__).parents[2] / "zero"
SHIPPED = Path(__file__).parents[2] / "configs" / "ds_config_zero3.json"


def errors(source, **options):
    """The lines of the error that ``source`` gives, without the name of the place."""
    with pytest.raises(ValueError) as caught:
        load_config(source, **options)
    return [line.split(": ", 1)[1] for line in str(caught.value).splitlines()]


def zero3(**keys):
    return {"zero_optimization": {"stage": 3, **keys}}


def optimizer(kind, **params):
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


def without_effect(raw):
    """The keys that the user gave and that do nothing, by the table which is printed at the start."""
    rows = [line.split() for line in report(load_config(raw, allow_auto=True)).splitlines() if " none: " in line]
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
    text = "{gradient_clipping: 0.5}"
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ValueError, match="line 1, column 2: not valid JSON"):
        load_config(text)
    hjson = SimpleNamespace(loads=lambda text, object_pairs_hook: object_pairs_hook([("gradient_clipping", 0.5)]))
    monkeypatch.setitem(sys.modules, "hjson", hjson)
    assert load_config(text).gradient_clipping == 0.5


def test_a_bucket_that_deepspeed_refuses_is_refused():
    with pytest.raises(ValueError, match="allgather_bucket_size must be a multiple of nccl_start_alignment_factor"):
        load_config(zero3(allgather_bucket_size=1001))


def test_the_users_dict_is_kept_and_left_unchanged():
    raw = {"bfloat16": {"enabled": True}, "train_batch_size": "auto", **zero3(cpu_offload=True)}
    before = copy.deepcopy(raw)
    config = load_config(raw, allow_auto=True)
    assert config.raw is raw and raw == before


@pytest.mark.parametrize("name", ["missing.json", "missing", "bm9uZQ=="])
def test_a_missing_file_is_named(name):
    with pytest.raises(ValueError, match=f"^{name}: cannot read .*No such file"):
        load_config(name)


def test_a_syntax_error_has_file_line_and_column(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n  "fp16": {"enabled": true,}\n}', encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: line 2, column ")


@pytest.mark.parametrize("source", ["[1]", 5, None])
def test_anything_but_an_object_is_an_error(source):
    assert "expected" in errors(source)[0]


def test_the_shipped_file_is_valid_and_every_key_of_it_has_an_effect():
    config = load_config(SHIPPED, allow_auto=True)
    zero = config.zero_optimization
    assert (zero.stage, zero.offload_param.device, zero.offload_optimizer.device) == (3, "cpu", "cpu")
    assert zero.sub_group_size == zero.stage3_max_live_parameters == zero.stage3_max_reuse_distance == 10**9
    # fp16.enabled is "auto", and the other keys of fp16 act with it only.
    assert [key for key in without_effect(SHIPPED) if not key.startswith("fp16.")] == [] == config.deprecated()
    assert len(config.auto) == 16


# ---- wrong keys


def test_a_misspelt_key_is_named_with_its_file_and_the_nearest_key(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(zero3(stage3_prefetch_bukcet_size=5)), encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        load_config(path)
    assert str(caught.value) == (
        f"{path}: zero_optimization.stage3_prefetch_bukcet_size: unknown key; "
        "did you mean zero_optimization.stage3_prefetch_bucket_size?"
    )


@pytest.mark.parametrize("key", ["amp", "elasticity", "zero_optimization.mics_shard_size"])
def test_keys_removed_from_deepspeed_say_so(key):
    section, _, leaf = key.rpartition(".")
    config = {section: {leaf: 1}} if section else {leaf: {}}
    assert errors(config)[0].startswith(f"{key}: was removed from DeepSpeed")


# What is wrong -> the one line about it.
ERRORS = [
    # unknown keys
    ({"zero_optimisation": {}}, "zero_optimisation: unknown key; did you mean zero_optimization?"),
    (
        {"stage3_prefetch_bukcet_size": 5},
        "stage3_prefetch_bukcet_size: unknown key; did you mean zero_optimization.stage3_prefetch_bucket_size?",
    ),
    (
        zero3(gradient_clipping=1.0),
        "zero_optimization.gradient_clipping: unknown key here; it is a valid key as gradient_clipping",
    ),
    (
        # A key that DeepSpeed never had, among others of the same configuration that it has.
        zero3(memory_efficient_linear=True, round_robin_gradients=True, use_static_tiling=True),
        "zero_optimization.use_static_tiling: unknown key; did you mean use_dynamic_tiling?",
    ),
    (
        optimizer("AdamW", weightdecay=0.1),
        "optimizer.params.weightdecay: unknown key; did you mean optimizer.params.weight_decay?",
    ),
    (
        scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_max_mon=0),
        "scheduler.params.cycle_max_mon: unknown key; did you mean scheduler.params.cycle_max_mom?",
    ),
    # wrong values
    ('{"zero_optimization": {"stage": 2, "stage": 3}}', "stage: given 2 times in one object; keep one of them"),
    ({"train_batch_size": True}, "train_batch_size: expected an integer, got true"),
    ({"train_batch_size": "8"}, 'train_batch_size: expected an integer, got the string "8"'),
    ({"train_batch_size": 0}, "train_batch_size: expected a number greater than 0, got 0"),
    ({"gradient_clipping": -1}, "gradient_clipping: expected a number of at least 0, got -1"),
    (zero3(overlap_comm=1), "zero_optimization.overlap_comm: expected true or false, got 1"),
    (zero3(sub_group_size=1.5), "zero_optimization.sub_group_size: expected an integer, got 1.5"),
    (
        zero3(sub_group_size="auto"),
        "zero_optimization.sub_group_size: "
        "'auto' is not filled in by transformers or accelerate for this key; set a value",
    ),
    ({"zero_optimization": True}, "zero_optimization: expected an object, got true"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: expected a number of at most 3, got 4"),
    (
        zero3(offload_param={"device": "gpu"}),
        "zero_optimization.offload_param.device: expected one of 'none', 'cpu' or 'nvme', got the string \"gpu\"",
    ),
    (
        {"communication_data_type": "fp8"},
        "communication_data_type: expected one of 'fp32', 'fp16', 'bf16', got 'fp8'",
    ),
    (
        optimizer("AdamW", betas=[0.9, 1.0]),
        "optimizer.params.betas: expected a list of two numbers of at least 0 and less than 1, got [0.9, 1.0]",
    ),
    (
        optimizer("OneBitAdam"),
        "optimizer.type: OneBitAdam cannot be used: it compresses the momentum across ranks by itself; "
        "use another one, such as AdamW",
    ),
    (
        optimizer("AdamX"),
        "optimizer.type: expected one of Adam, AdamW, SGD, Adagrad, Lion, RMSprop, NAdam, RAdam, Adamax, Adadelta, "
        "ASGD, Rprop, Muon, got 'AdamX'; pass any other to initialize()",
    ),
    (optimizer("SGD", momentum="0.9"), 'optimizer.params.momentum: expected a number, got the string "0.9"'),
    ({"scheduler": {"params": {}}}, "scheduler.type: is required"),
    (
        scheduler("WarmupLR", warmup_type="cosine"),
        "scheduler.params.warmup_type: expected one of 'log' or 'linear', got the string \"cosine\"",
    ),
    (
        {"gradient_allreduce_op": "max"},
        "gradient_allreduce_op: expected one of 'mean' or 'sum', got the string \"max\"",
    ),
    (
        {"tensor_parallel": {"autotp_size": 2}},
        "tensor_parallel.autotp_size: 2 is not available: the model is sharded over data-parallel ranks only; use 1",
    ),
    # contradictions
    (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer.device: needs zero_optimization.stage of at least 1, got 0",
    ),
    (
        zero3(offload_optimizer={"device": "nvme"}),
        "zero_optimization.offload_optimizer.nvme_path: is missing, and device is nvme; name a folder on a fast disk",
    ),
    (
        zero3(cpu_offload=True, offload_optimizer={"device": "cpu"}),
        "zero_optimization.cpu_offload: old name of zero_optimization.offload_optimizer, which is given too; "
        "delete zero_optimization.cpu_offload",
    ),
    (
        scheduler("WarmupLR", total_num_steps=10),
        "scheduler.params.total_num_steps: is a setting of WarmupDecayLR, WarmupCosineLR, not of WarmupLR; "
        "change scheduler.type or delete it",
    ),
    (scheduler("WarmupDecayLR"), "scheduler.params.total_num_steps: is required by WarmupDecayLR"),
    (
        scheduler("OneCycle", cycle_min_lr=0.1, cycle_max_lr=None),
        "scheduler.params.cycle_max_lr: is required by OneCycle",
    ),
    (
        optimizer("AdamW", momentum=None),
        "optimizer.params.momentum: is a setting of SGD, RMSprop, Muon, not of AdamW; "
        "change optimizer.type or delete it",
    ),
    (
        optimizer("lion", eps=1e-8),
        "optimizer.params.eps: is a setting of Adam, AdamW, Adagrad, RMSprop, NAdam, RAdam, "
        "Adamax, Adadelta, Muon, not of Lion; change optimizer.type or delete it",
    ),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 32}},
        "fp16.min_loss_scale: 32 is above 2 ** initial_scale_power = 16",
    ),
    (
        {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
        "train_batch_size: 7 is not a whole multiple of train_micro_batch_size_per_gpu 2",
    ),
]


@pytest.mark.parametrize(("config", "line"), ERRORS)
def test_an_error_says_what_is_wrong_and_what_is_right(config, line):
    assert errors(config) == [line]


def test_numbers_in_scientific_notation_are_integers_if_they_are_whole():
    config = load_config(zero3(reduce_bucket_size=5e8))
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert type(config.zero_optimization.reduce_bucket_size) is int


def test_all_errors_are_reported_together():
    lines = errors({"train_batch_size": "8", "fp16": {"enabled": True}, "bf16": {"enabled": True}, **zero3(bukcet=1)})
    assert [line.split(":")[0] for line in lines] == ["train_batch_size", "zero_optimization.bukcet", "bf16.enabled"]


@pytest.mark.parametrize("keys", [{"stage3_max_live_parameters": 5}, {"offload_param": {"device": "none"}}])
def test_stage3_keys_at_a_lower_stage_are_no_contradiction(keys):
    load_config({"zero_optimization": {"stage": 1, **keys}})


# ---- "auto"


def test_auto_takes_deepspeeds_default_where_there_is_one():
    raw = {
        "gradient_clipping": "auto",
        "optimizer": {
            "type": "adamw",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        **zero3(stage3_prefetch_bucket_size="auto", reduce_bucket_size="auto"),
    }
    config = load_config(raw)
    assert config.gradient_clipping == 1.0
    assert config.zero_optimization.stage3_prefetch_bucket_size == 50_000_000
    assert dict(**config.optimizer.params) == {}, "left to the optimizer, see test_optimizer_factory.py"
    assert "zero_optimization.reduce_bucket_size" in config.auto


def test_auto_without_a_default_is_an_error_unless_it_will_be_filled_in():
    raw = {
        "zero_optimization": {"stage": "auto", "offload_param": {"device": "cpu"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    }
    assert [line.split(":")[0] for line in errors(raw)] == [
        "zero_optimization.stage",
        "scheduler.params.total_num_steps",
    ]
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
    config = load_config({key: value for key, value in zip(keys, given, strict=True) if value is not None})
    assert config.resolve_batch(3) is config
    assert tuple(getattr(config, key) for key in keys) == resolved


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 1},
            "train_batch_size: 6 is not train_micro_batch_size_per_gpu 6 x gradient_accumulation_steps 1 x world size 2"
            " = 12; change one of them or leave one out",
        ),
        (
            {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 6},
            "train_batch_size: 6 is not a whole multiple of train_micro_batch_size_per_gpu 6 x world size 2",
        ),
        ({"train_batch_size": 1}, "train_batch_size: 1 is not a whole multiple of world size 2"),
        (
            {"gradient_accumulation_steps": 4},
            "train_micro_batch_size_per_gpu: is missing, and train_batch_size is not given either; "
            "set one of them to a number",
        ),
        (
            {"train_micro_batch_size_per_gpu": "auto"},
            "train_micro_batch_size_per_gpu: is still 'auto', and train_batch_size is not given either; "
            "set one of them to a number",
        ),
    ],
)
def test_batch_sizes_that_do_not_multiply_out(raw, message):
    with pytest.raises(ValueError) as caught:
        load_config(raw).resolve_batch(2)
    assert str(caught.value).endswith(message)


# ---- settings


def test_defaults_are_deepspeeds():
    config = Config()
    zero = config.zero_optimization
    assert config.gradient_clipping == 1.0 and config.steps_per_print is None and config.zero_force_ds_cpu_optimizer
    assert (zero.stage, zero.contiguous_gradients, zero.overlap_comm) == (0, True, False)
    assert load_config(zero3()).zero_optimization.overlap_comm is True
    assert (zero.reduce_bucket_size, zero.sub_group_size) == (5e8, 1e9)
    assert (zero.stage3_prefetch_bucket_size, zero.stage3_param_persistence_threshold) == (5e7, 1e5)
    assert (zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance) == (1e9, 1e9)
    assert (config.fp16.initial_scale_power, config.fp16.hysteresis, config.fp16.loss_scale_window) == (16, 1, 1000)
    assert load_config(zero3()).fp16.hysteresis == 2


@pytest.mark.parametrize(
    ("raw", "dtype"),
    [
        ({}, torch.float32),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, torch.float16),
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"bfloat16": {"enabled": True}}, torch.bfloat16),
    ],
)
def test_compute_dtype(raw, dtype):
    assert load_config(raw).compute_dtype == dtype


def test_dtype_names():
    config = load_config({"communication_data_type": "FP32", "data_types": {"grad_accum_dtype": "bfloat16"}})
    assert config.communication_data_type == torch.float32
    assert config.data_types.grad_accum_dtype == torch.bfloat16
    assert load_config({"communication_data_type": None}).communication_data_type is None


def test_parameters_of_an_optimizer_are_what_the_user_set_and_has_an_effect():
    params = {"lr": 0.1, "betas": [0.5, 0.6], "fused": None, "bias_correction": True, "set_grad_none": False}
    config = load_config(optimizer("adam", **params))
    assert config.optimizer.type == "Adam"
    assert dict(**config.optimizer.params) == {"lr": 0.1, "betas": (0.5, 0.6), "fused": None}
    assert without_effect(config.raw) == ["optimizer.params.bias_correction", "optimizer.params.set_grad_none"]


def test_old_names_act_as_the_new_ones_and_are_reported():
    config = load_config(
        zero3(cpu_offload=True, cpu_offload_param=False, stage3_gather_fp16_weights_on_model_save=True)
    )
    zero = config.zero_optimization
    assert zero.offloads_optimizer and not zero.offloads_params
    assert zero.stage3_gather_16bit_weights_on_model_save
    assert ("zero_optimization.cpu_offload", "zero_optimization.offload_optimizer") in config.deprecated()
    assert len(config.deprecated()) == 3


# ---- keys without effect


def test_keys_without_effect_are_listed_by_name():
    raw = {
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "tensorboard": {"enabled": True, "job_name": "run"},
        "aio": {"block_size": 1e6},
        "activation_checkpointing": {"partition_activations": True},
        **zero3(
            round_robin_gradients=True,
            allgather_bucket_size=5e8,
            offload_optimizer={"device": "cpu", "pin_memory": True, "pipeline_read": True},
        ),
    }
    assert without_effect(raw) == [
        "activation_checkpointing.partition_activations",
        "aio.block_size",
        "steps_per_print",
        "tensorboard.enabled",
        "tensorboard.job_name",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.offload_optimizer.pipeline_read",
        "zero_optimization.round_robin_gradients",
    ]
    assert without_effect(zero3()) == []


def test_every_key_without_a_mark_is_read_by_the_engine():
    # The first ones act inside zero.config, the third in accelerate, which reads the dict, and the others in torch.
    read_elsewhere = {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_force_ds_cpu_optimizer",
        *OptimizerParams.model_fields,
    }
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.parent.name != "config"]
    words = set(re.findall(r"\w+", "\n".join(sources)))
    acting = set()
    sections = [Config]
    for section in sections:
        for key, field in section.model_fields.items():
            if section.about(key).get("unused"):
                continue
            inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
            inner = [kind for kind in inner if issubclass(kind, Section)]
            sections += inner
            acting |= set() if inner else {key}
    assert len(acting) > 30
    assert acting - read_elsewhere - words == set()


def test_every_key_says_what_it_does_or_why_it_does_nothing():
    sections = [Config]
    for section in sections:
        for key, field in section.model_fields.items():
            inner, text = section_of(section, key), field.description or section.about(key).get("unused")
            if inner is not None and not issubclass(inner, IdleSection):
                sections.append(inner)
                text = inner.__doc__
            assert text, f"{section.__name__}.{key}"
    assert len(sections) > 12
