"""zero.config: unusual, generated and hostile input is either accepted with its meaning or refused
by name.
"""

import json
import os
import re
import sys

import pytest

from benchmarks.faults.config import GOOD, known_configurations, mutate
from tests.unit.configurations import errors, zero3
from zero.config import Config, load_config
from zero.config.idle import OLD_NAMES, REMOVED_KEYS
from zero.config.load import nearest, section_of
from zero.config.table import announce, report


def rows(config, **options):
    """Return the table's rows by key: [given, effective, from, effect]."""
    lines = [re.split(r"\s{2,}", line) for line in report(config, **options).splitlines()[1:]]
    return {line[0]: line[1:] for line in lines}


# ---- dotted keys

PREFETCH = "zero_optimization.stage3_prefetch_bucket_size"


def test_a_dotted_key_means_the_nested_one():
    config = load_config({PREFETCH: 7, "fp16.enabled": True, "zero_optimization": {"stage": 3}})
    assert config.zero_optimization.stage3_prefetch_bucket_size == 7 and config.fp16.enabled
    assert rows(config)[PREFETCH] == ["7", "7", "configuration (dotted key)"]
    assert errors({"zero_optimization.stage3_prefetch_bukcet_size": 7}) == [
        f"zero_optimization.stage3_prefetch_bukcet_size: unknown key; did you mean {PREFETCH}?"
    ]


def test_a_dotted_key_that_contradicts_the_nested_one_is_an_error_in_a_file(tmp_path):
    both = {**zero3(stage3_prefetch_bucket_size=5), PREFETCH: 7}
    assert errors(json.dumps(both)) == [
        f"{PREFETCH}: is 7 here, and 5 in its section; delete one of them"
    ]
    assert errors(json.dumps({"fp16": 1, "fp16.enabled": True}))[0] == (
        "fp16.enabled: contradicts fp16, which is given too and is not an object; delete one of "
        "them"
    )
    load_config(json.dumps({**zero3(stage3_prefetch_bucket_size="auto"), PREFETCH: 7}))
    # TRL adds this key to a dict whose values are filled in. The later value holds, cut to a whole
    # number.
    assert (
        load_config({**both, PREFETCH: 0.9 * 64 * 64}).zero_optimization.stage3_prefetch_bucket_size
        == 3686
    )


# ---- unknown keys


def acting_keys(model=Config):
    for key in model.model_fields:
        yield key
        if (section := section_of(model, key)) is not None:
            yield from acting_keys(section)


def test_a_key_like_no_other_is_passed_over_and_named():
    keys = {
        "_comment": "?",
        "monitor_config": {},
        "cuda_visible_devices": "0",
        "log": {},
        "comms_config": {},
    }
    config = load_config({**keys, **zero3(), "tensorboard": {"_comment": 1, "enabled": False}})
    assert config.origin.ignored == [*keys, "tensorboard._comment"]
    assert f"unknown keys, ignored: {', '.join(config.origin.ignored)}" in report(
        config, everything=False
    )


def test_a_file_without_any_key_of_deepspeed_is_another_file():
    assert errors({"architectures": ["T5"], "d_model": 5}) == [
        "architectures: neither this nor any other key is a key of DeepSpeed: is this the right "
        "file?"
    ]


@pytest.mark.parametrize(
    "key",
    [
        "tensorboard.enabeld",
        "comms_logger.verbos",
        "checkpoint.writer.tpye",
        "timers.throughputt",
        "apm",
        "bfloat61",
    ],
)
def test_a_misspelt_key_is_an_error_in_sections_without_effect_too(key):
    *path, last = key.split(".")
    config = value = {}
    for part in path:
        value = value.setdefault(part, {})
    value[last] = {}
    assert errors({**config, **zero3()})[0].startswith(f"{key}: unknown key; did you mean ")


def test_no_key_with_one_wrong_letter_is_taken_for_an_unknown_one():
    others = (*OLD_NAMES, *REMOVED_KEYS)
    names = {*acting_keys(), *(part for dotted in others for part in dotted.split("."))}
    assert len(names) > 200
    for name in names:
        for at in range(len(name)):
            moved = name[:at] + name[at + 1 : at + 2] + name[at] + name[at + 2 :]
            for typo in (
                name[:at] + name[at + 1 :],
                name[:at] + "#" + name[at + 1 :],
                name[:at] + "#" + name[at:],
                moved,
            ):
                assert nearest(typo, [name]), (name, typo)


# ---- values


@pytest.mark.parametrize("op", ["SUM", "Mean"])
def test_words_have_no_case(op):
    raw = {
        "gradient_allreduce_op": op,
        "checkpoint": {"tag_validation": "FAIL"},
        "scheduler": {"type": "warmuplr", "params": {"warmup_type": "LINEAR"}},
        **zero3(offload_param={"device": "CPU"}, offload_optimizer={"device": "CPU"}),
    }
    config = load_config(raw)
    assert config.gradient_allreduce_op == op.lower() and config.checkpoint.tag_validation == "Fail"
    assert (config.scheduler.type, config.scheduler.params.warmup_type) == ("WarmupLR", "linear")
    zero = config.zero_optimization
    assert zero.offloads_params and zero.offloads_optimizer


def test_a_sub_group_of_size_0_is_all_at_once():
    assert load_config(zero3(sub_group_size=0)).zero_optimization.sub_group_size == sys.maxsize


def warmup(**params):
    return {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, **params}}}


def one_cycle(**params):
    return {
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1, **params},
        }
    }


BAD_VALUES = [
    ('{"gradient_clipping": NaN}', "gradient_clipping: expected a finite number"),
    (
        '{"optimizer": {"type": "SGD", "params": {"lr": Infinity}}}',
        "optimizer.params.lr: expected a finite number",
    ),
    (
        {"optimizer": {"type": "SGD", "params": {"lr": -0.1}}},
        "optimizer.params.lr: expected a number of at least 0",
    ),
    (
        {"optimizer": {"type": "SGD", "params": {"momentum": 1.1}}},
        "optimizer.params.momentum: expected a number of at most 1",
    ),
    (
        warmup(warmup_min_lr=-1),
        "scheduler.params.warmup_min_lr: expected a number of at least 0",
    ),
    (
        warmup(warmup_num_steps=-1),
        "scheduler.params.warmup_num_steps: expected a number of at least 0",
    ),
    (
        warmup(warmup_num_steps=11),
        "scheduler.params.warmup_num_steps: 11 is more than total_num_steps, which is 10",
    ),
    (
        warmup(warmup_min_lr=2, warmup_max_lr=[3, 1]),
        "scheduler.params.warmup_min_lr: 2.0 is more than warmup_max_lr",
    ),
    (
        one_cycle(cycle_max_mom=1.5),
        "scheduler.params.cycle_max_mom: expected a number of at most 1",
    ),
    (
        one_cycle(cycle_min_mom=0.9, cycle_max_mom=0.8),
        "scheduler.params.cycle_min_mom: 0.9 is more than cycle_max_mom",
    ),
    (
        {"optimizer": {"type": "Rprop", "params": {"step_sizes": [2, 1]}}},
        "optimizer.params.step_sizes: expected two numbers above 0, the smaller one first",
    ),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 1e9}},
        "fp16.initial_scale_power: expected a number of at most 127",
    ),
    (zero3(cpu_offload="yes"), "zero_optimization.cpu_offload: expected true or false, got 'yes'"),
    (
        zero3(offload_param={"nvme_path": "a\0b"}),
        "zero_optimization.offload_param.nvme_path: 'a\\x00b' is not a path",
    ),
    (
        zero3(sub_group_size=10**30),
        "zero_optimization.sub_group_size: expected a number of at most 9.22337e+18",
    ),
    (
        {"torch_autocast": {"enabled": True}},
        "torch_autocast.enabled: True is not available: the whole model has the dtype",
    ),
    (
        {f"key_{i}": 1 for i in range(2000)},
        "key_0: unknown key, as 1999 others: this is not a DeepSpeed configuration",
    ),
    ('{"a": ' * 900 + "1" + "}" * 900, "nested more than 32 levels deep"),
    ('{"train_batch_size": ' + "1" * 5000 + "}", "Exceeds the limit (4300 digits)"),
    ('{"train_batch_size": ' + "1" * 200 + "}", "a number has more than 100"),
    ({"optimizer": {"type": "SGD", "params": {"lr": 10**5000}}}, "a number has more than 100"),
    ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale: expected a number"),
    ("[" * 100_000, "nested more than 32 levels deep"),
    ({1: 2}, "the key 1 is not a string"),
]


@pytest.mark.parametrize(("source", "message"), BAD_VALUES, ids=range(len(BAD_VALUES)))
def test_a_value_that_cannot_work_is_refused(source, message):
    assert errors(source)[0].startswith(message)


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert errors(tmp_path / "pipe") == [
        "cannot read the DeepSpeed configuration: not a regular file"
    ]


def test_a_number_of_ranks_that_is_not_there():
    config = load_config({"train_batch_size": 7, "data_parallel_size": 7})
    with pytest.raises(ValueError, match="data_parallel_size: is 7, and the number of ranks is 1"):
        config.resolve(1)
    assert config.resolve(7).train_micro_batch_size_per_gpu == 1


def test_settings_of_an_optimizer_that_is_refused_are_not_listed_too():
    assert (
        len(
            errors(
                {
                    "optimizer": {
                        "type": "OneBitLamb",
                        "params": {"max_coeff": 0.3, "bias_correction": False},
                    }
                }
            )
        )
        == 1
    )


# ---- the table


def filled(tmp_path):
    """Return a configuration as the Trainer and accelerate pass it on."""
    words = ["train.py", f"--output_dir={tmp_path / 'out'}"]
    return load_config(
        {
            **zero3(),
            "steps_per_print": float("inf"),
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
        },
        command_line=words,
    )


def test_the_screen_shows_what_is_not_at_its_default_and_names_the_file(tmp_path, capsys):
    config = filled(tmp_path)
    announce(config)
    announce(config)
    first, header, *lines, last = capsys.readouterr().err.splitlines()
    assert first == "zero is the engine of this run, with these settings:"
    assert header.split() == ["key", "given", "effective", "from"]
    assert [line.split()[0] for line in lines] == [
        "gradient_clipping",
        "steps_per_print",
        "zero_optimization.stage",
        "bf16.enabled",
    ]
    path = tmp_path / "out" / "zero_config.txt"
    assert last == f"all other keys are at their defaults; {path} lists them"
    assert len(path.read_text().splitlines()) > 100


def test_clipping_that_nobody_asked_for_is_on_the_screen():
    """Older DeepSpeeds did not clip by default."""
    shown = rows(load_config({"train_batch_size": 1}), everything=False)
    assert shown["gradient_clipping"] == ["-", "1.0", "default"]


def test_settings_of_the_loss_scale_are_free_where_fp16_is_off():
    scale = {"initial_scale_power": 200, "min_loss_scale": 0, "hysteresis": 0}
    assert not load_config({"fp16": {"enabled": False, **scale}}).fp16.enabled
    assert len(errors({"fp16": {"enabled": True, **scale}})) == 3


def test_types_and_signs_of_the_loss_scale_are_checked_where_fp16_is_off():
    wrong = {"loss_scale": "dynamic", "initial_scale_power": 1.5, "hysteresis": -1}
    lines = errors({"fp16": {"enabled": False, "consecutive_hysteresis": 3, **wrong}})
    names = ["loss_scale", "initial_scale_power", "hysteresis", "consecutive_hysteresis"]
    assert [line.split(":")[0] for line in lines] == [f"fp16.{name}" for name in names]


def test_notes_are_ignored_and_named_in_every_section():
    notes = {"comment": "?", "//": 1, "_note": {}}
    raw = {**notes, **zero3(**notes, offload_param={"device": "none", **notes})}
    ignored = load_config(raw).origin.ignored
    assert len(ignored) == 9 and "zero_optimization.offload_param.comment" in ignored


def test_every_row_is_true():
    params = {"type": "AdamW", "params": {"lr": 0.1}}
    scheduler = {"type": "WarmupLR", "params": {}}
    config = load_config(
        {"train_batch_size": 4, "optimizer": params, "scheduler": scheduler, **zero3()}
    )
    table = rows(config.resolve(2))
    assert table["train_batch_size"] == ["4", "4", "configuration"]
    assert table["train_micro_batch_size_per_gpu"] == ["-", "2", "default"]
    assert table["zero_optimization.overlap_comm"] == ["-", "true", "default"]
    assert table["optimizer.params.betas"] == ["-", "[0.9, 0.999]", "default"]
    assert (
        table["optimizer.params.weight_decay"][1] == "0.0"
        and table["optimizer.params.eps"][1] == "1e-08"
    )
    absent = (
        "optimizer.params.nesterov",
        "optimizer.params.centered",
        "scheduler.params.cycle_min_lr",
    )
    assert not table.keys() & set(absent)
    assert "none: no other value is available" in table["zero_optimization.compute_grad_norm"][-1]
    assert table["fp16.hysteresis"][3] == "none: the section is not enabled"

    table = rows(
        load_config({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})
    )
    effect = table["zero_optimization.offload_param.device"][3]
    assert effect == "none: needs stage 3, and this is stage 2"


# ---- damaged configurations


def test_damaged_configurations_are_accepted_or_refused():
    outcomes = mutate(60, seed=1, configs=known_configurations())
    assert outcomes.keys() <= GOOD and sum(outcomes.values()) >= 50, outcomes
    assert outcomes["accepted"] > 0 and outcomes["refused"] > 10
