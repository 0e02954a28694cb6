"""zero.config: what each error says is wrong, and what is right."""

import os
import random

import pytest

from benchmarks.faults import config as faults
from tests.unit.configurations import errors, optimizer, scheduler, zero3
from zero.config import load_config


def test_an_error_in_a_file_begins_with_its_name(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n  "fp16": {"enabled": true,}\n}', encoding="utf-8")
    with pytest.raises(ValueError, match=f"^{path}: line 2, column "):
        load_config(path)


def decay(**params):
    return scheduler("WarmupDecayLR", total_num_steps=10, **params)


def one_cycle(**params):
    return scheduler("OneCycle", cycle_min_lr=0.1, cycle_max_lr=1, **params)


def fp16(**keys):
    return {"fp16": {"enabled": True, **keys}}


# A wrong configuration, and a part of the one line of its error.
ERRORS = [
    # keys
    ({"stage3_prefetch_bukcet_size": 5}, "did you mean zero_optimization.stage3_prefetch_bucket_s"),
    (zero3(gradient_clipping=1.0), "unknown key here; it is a valid key as gradient_clipping"),
    # DeepSpeed has the first one, and never had the second.
    (zero3(memory_efficient_linear=True, use_static_tiling=True), "mean use_dynamic_tiling?"),
    (optimizer("AdamW", weightdecay=0.1), "did you mean optimizer.params.weight_decay?"),
    ({"amp": {}}, "amp: was removed from DeepSpeed"),
    (zero3(zeropp_loco_param=1), "zero_optimization.zeropp_loco_param: was removed from DeepSpeed"),
    ({"checkpoint": {"writer": {"tpye": 1}}}, "checkpoint.writer.tpye: unknown key; did you mean "),
    ({"architectures": ["T5"], "d_model": 5}, "a key of DeepSpeed: is this the right file?"),
    ({f"key_{i}": 1 for i in range(2000)}, "key_0: unknown key, as 1999 others"),
    ({1: 2}, "the key 1 is not a string"),
    # kinds of values
    ('{"zero_optimization": {"stage": 2, "stage": 3}}', "stage: given 2 times in one object"),
    ({"train_batch_size": True}, "train_batch_size: expected an integer, got true"),
    ({"train_batch_size": "8"}, 'train_batch_size: expected an integer, got the string "8"'),
    (zero3(overlap_comm=1), "zero_optimization.overlap_comm: expected true or false, got 1"),
    (zero3(sub_group_size=1.5), "zero_optimization.sub_group_size: expected an integer, got 1.5"),
    (optimizer("SGD", momentum="auto"), "momentum: 'auto' has no default, and nothing fills it in"),
    (zero3(offload_param={"device": "gpu"}), "'cpu' or 'nvme', got the string \"gpu\""),
    ({"communication_data_type": "fp8"}, "expected one of 'fp32', 'fp16', 'bf16', got 'fp8'"),
    (optimizer("OneBitAdam"), "OneBitAdam cannot be used: it compresses the momentum"),
    ({"scheduler": {"params": {}}}, "scheduler.type: is required"),
    (scheduler("WarmupLR", warmup_type="cosine"), "expected one of 'log' or 'linear', got the str"),
    (zero3(offload_param={"nvme_path": "a\0b"}), "nvme_path: 'a\\x00b' is not a path"),
    # ranges
    ({"zero_optimization": {"stage": 4}}, "stage: expected a number of at most 3"),
    (optimizer("AdamW", betas=[0.9, 1.0]), "betas: expected a number less than 1, got [0.9, 1.0]"),
    ('{"gradient_clipping": NaN}', "gradient_clipping: expected a finite number"),
    ('{"optimizer": {"type": "SGD", "params": {"lr": Infinity}}}', "lr: expected a finite number"),
    (optimizer("Rprop", step_sizes=[2, 1]), "expected two numbers above 0, the smaller one first"),
    (optimizer("SGD", lr=10**5000), "a number has more than 100"),
    (fp16(initial_scale_power=1e9), "fp16.initial_scale_power: expected a number of at most 127"),
    (zero3(sub_group_size=10**30), "sub_group_size: expected a number of at most 9.22337e+18"),
    (zero3(zero_quantized_gradients=True, zero_quantized_gradient_bits=6), "4 or 8"),
    (zero3(allgather_bucket_size=1001), "must be a multiple of nccl_start_alignment_factor"),
    ("[" * 100_000, "nested more than 32 levels deep"),
    ('{"train_batch_size": ' + "1" * 5000 + "}", "Exceeds the limit (4300 digits)"),
    # contradictions
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "stage of at least 1, got 0"),
    (zero3(offload_optimizer={"device": "nvme"}), "nvme_path: is missing, and device is nvme"),
    (zero3(cpu_offload=True, offload_optimizer={}), "delete zero_optimization.cpu_offload"),
    (scheduler("WarmupDecayLR"), "scheduler.params.total_num_steps: is required by WarmupDecayLR"),
    (optimizer("AdamW", momentum=None), "a setting of SGD, RMSprop, Muon, not of AdamW"),
    (optimizer("lion", eps=1e-8), "Muon, Lamb, not of Lion; change optimizer.type or delete it"),
    (fp16(initial_scale_power=4, min_loss_scale=32), "32 is above 2 ** initial_scale_power = 16"),
    (decay(warmup_num_steps=11), "11 is more than total_num_steps, which is 10"),
    (decay(warmup_min_lr=2, warmup_max_lr=[3, 1]), "warmup_min_lr: 2.0 is more than warmup_max_lr"),
    (one_cycle(cycle_min_mom=0.9, cycle_max_mom=0.8), "0.9 is more than cycle_max_mom"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled: True is not available"),
    ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "7 is not a whole multiple of"),
    # sources
    (None, "expected"),
]


@pytest.mark.parametrize(("config", "says"), ERRORS, ids=range(len(ERRORS)))
def test_an_error_says_what_is_wrong_and_what_is_right(config, says):
    (line,) = errors(config)
    assert says in line


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert errors(tmp_path / "pipe") == [
        "cannot read the DeepSpeed configuration: not a regular file"
    ]


def test_all_errors_are_reported_together():
    lines = errors(
        {"train_batch_size": "8", "bf16": {"enabled": True}, **fp16(), **zero3(bukcet=1)}
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


def test_a_sample_of_damaged_configurations(tmp_path):
    """Each is accepted, or refused by name, and none with a misspelt key is accepted."""
    found = faults.run(30, random.Random(1), tmp_path)
    assert not found.failures and found.outcomes["misspelt key refused"] == 60
