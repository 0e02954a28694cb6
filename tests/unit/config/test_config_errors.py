"""zero.config: the text of each error message."""

import json

import pytest

from tests.unit.configurations import errors, optimizer, scheduler, zero3
from zero.config import load_config


def test_a_misspelt_key_is_named_with_its_file_and_the_nearest_key(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(zero3(stage3_prefetch_bukcet_size=5)), encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        load_config(path)
    assert str(caught.value) == (
        f"{path}: zero_optimization.stage3_prefetch_bukcet_size: unknown key; "
        "did you mean zero_optimization.stage3_prefetch_bucket_size?"
    )


@pytest.mark.parametrize("key", ["amp", "elasticity", "zero_optimization.zeropp_loco_param"])
def test_keys_removed_from_deepspeed_say_so(key):
    section, _, leaf = key.rpartition(".")
    config = {section: {leaf: 1}} if section else {leaf: {}}
    assert errors(config)[0].startswith(f"{key}: was removed from DeepSpeed")


# A wrong configuration, and the one line of its error.
ERRORS = [
    # unknown keys
    ({"zero_optimisation": {}}, "zero_optimisation: unknown key; did you mean zero_optimization?"),
    (
        {"stage3_prefetch_bukcet_size": 5},
        "stage3_prefetch_bukcet_size: unknown key; did you mean "
        "zero_optimization.stage3_prefetch_bucket_size?",
    ),
    (
        zero3(gradient_clipping=1.0),
        "zero_optimization.gradient_clipping: unknown key here; it is a valid key as "
        "gradient_clipping",
    ),
    (
        # DeepSpeed never had this key.
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
    (
        '{"zero_optimization": {"stage": 2, "stage": 3}}',
        "stage: given 2 times in one object; keep one of them",
    ),
    ({"train_batch_size": True}, "train_batch_size: expected an integer, got true"),
    ({"train_batch_size": "8"}, 'train_batch_size: expected an integer, got the string "8"'),
    ({"train_batch_size": 0}, "train_batch_size: expected a number greater than 0, got 0"),
    ({"gradient_clipping": -1}, "gradient_clipping: expected a number of at least 0, got -1"),
    (zero3(overlap_comm=1), "zero_optimization.overlap_comm: expected true or false, got 1"),
    (zero3(sub_group_size=1.5), "zero_optimization.sub_group_size: expected an integer, got 1.5"),
    (
        optimizer("SGD", momentum="auto"),
        "optimizer.params.momentum: "
        "'auto' has no default, and nothing fills it in for this key; set a value",
    ),
    ({"zero_optimization": True}, "zero_optimization: expected an object, got true"),
    (
        {"zero_optimization": {"stage": 4}},
        "zero_optimization.stage: expected a number of at most 3, got 4",
    ),
    (
        zero3(offload_param={"device": "gpu"}),
        "zero_optimization.offload_param.device: expected one of 'none', 'cpu' or 'nvme', got the "
        'string "gpu"',
    ),
    (
        {"communication_data_type": "fp8"},
        "communication_data_type: expected one of 'fp32', 'fp16', 'bf16', got 'fp8'",
    ),
    (
        optimizer("AdamW", betas=[0.9, 1.0]),
        "optimizer.params.betas: expected a number less than 1, got [0.9, 1.0]",
    ),
    (
        optimizer("OneBitAdam"),
        "optimizer.type: OneBitAdam cannot be used: it compresses the momentum across ranks by "
        "itself; "
        "use another one, such as AdamW",
    ),
    (
        optimizer("AdamX"),
        "optimizer.type: expected one of Adam, AdamW, SGD, Adagrad, Lion, RMSprop, NAdam, RAdam, "
        "Adamax, Adadelta, "
        "ASGD, Rprop, Muon, Lamb, got 'AdamX'; pass any other to initialize()",
    ),
    (
        optimizer("SGD", momentum="0.9"),
        'optimizer.params.momentum: expected a number, got the string "0.9"',
    ),
    ({"scheduler": {"params": {}}}, "scheduler.type: is required"),
    (
        scheduler("WarmupLR", warmup_type="cosine"),
        "scheduler.params.warmup_type: expected one of 'log' or 'linear', got the string "
        '"cosine"',
    ),
    (
        {"gradient_allreduce_op": "max"},
        "gradient_allreduce_op: expected one of 'mean' or 'sum', got the string \"max\"",
    ),
    (
        {"tensor_parallel": {"autotp_size": -1}},
        "tensor_parallel.autotp_size: expected a number of at least 0, got -1",
    ),
    # contradictions
    (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer.device: needs zero_optimization.stage of at least 1, "
        "got 0",
    ),
    (
        zero3(offload_optimizer={"device": "nvme"}),
        "zero_optimization.offload_optimizer.nvme_path: is missing, and device is nvme; name a "
        "folder on a fast disk",
    ),
    (
        zero3(cpu_offload=True, offload_optimizer={"device": "cpu"}),
        "zero_optimization.cpu_offload: old name of zero_optimization.offload_optimizer, which is "
        "given too; "
        "delete zero_optimization.cpu_offload",
    ),
    (
        scheduler("WarmupLR", total_num_steps=10),
        "scheduler.params.total_num_steps: is a setting of WarmupDecayLR, WarmupCosineLR, not of "
        "WarmupLR; "
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
        "Adamax, Adadelta, Muon, Lamb, not of Lion; change optimizer.type or delete it",
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
    lines = errors(
        {
            "train_batch_size": "8",
            "fp16": {"enabled": True},
            "bf16": {"enabled": True},
            **zero3(bukcet=1),
        }
    )
    assert [line.split(":")[0] for line in lines] == [
        "train_batch_size",
        "zero_optimization.bukcet",
        "bf16.enabled",
    ]


@pytest.mark.parametrize(
    "keys", [{"stage3_max_live_parameters": 5}, {"offload_param": {"device": "none"}}]
)
def test_stage3_keys_at_a_lower_stage_are_no_contradiction(keys):
    load_config({"zero_optimization": {"stage": 1, **keys}})
