"""zero.config: unusual, generated and hostile input is either accepted with its meaning or refused
by name.
"""

import json
import re
import sys

from tests.unit.configurations import all_keys, errors, zero3
from zero.config import load_config
from zero.config.idle import OLD_NAMES, REMOVED_KEYS
from zero.config.load import nearest
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


def test_a_dotted_key_that_contradicts_the_nested_one_is_an_error_in_a_file():
    both = {**zero3(stage3_prefetch_bucket_size=5), PREFETCH: 7}
    said = f"{PREFETCH}: is 7 here, and 5 in its section; delete one of them"
    assert errors(json.dumps(both)) == [said]
    (line, *_) = errors(json.dumps({"fp16": 1, "fp16.enabled": True}))
    assert line.startswith("fp16.enabled: contradicts fp16, which is given too and is not an obj")
    load_config(json.dumps({**zero3(stage3_prefetch_bucket_size="auto"), PREFETCH: 7}))
    # TRL adds this key to a dict whose values are filled in. The later value holds, cut to a whole
    # number.
    config = load_config({**both, PREFETCH: 0.9 * 64 * 64})
    assert config.zero_optimization.stage3_prefetch_bucket_size == 3686


# ---- unknown keys


def test_a_key_like_no_other_is_passed_over_and_named():
    keys = {"_comment": "?", "//": 1, "monitor_config": {}, "cuda_visible_devices": "0", "log": {}}
    sections = {**zero3(offload_param={"comment": 1}), "tensorboard": {"_note": 1}}
    config = load_config({**keys, **sections})
    inner = ["zero_optimization.offload_param.comment", "tensorboard._note"]
    assert sorted(config.origin.ignored) == sorted([*keys, *inner])
    said = f"unknown keys, ignored: {', '.join(config.origin.ignored)}"
    assert said in report(config, everything=False)


def test_no_key_with_one_wrong_letter_is_taken_for_an_unknown_one():
    names = {key for _, key in all_keys()}
    names |= {part for dotted in (*OLD_NAMES, *REMOVED_KEYS) for part in dotted.split(".")}
    assert len(names) > 200
    for name in names:
        for at in range(len(name)):
            before, letter, after = name[:at], name[at], name[at + 1 :]
            moved = before + after[:1] + letter + after[1:]
            for typo in (before + after, f"{before}#{after}", f"{before}#{letter}{after}", moved):
                assert nearest(typo, [name]), (name, typo)


# ---- values


def test_words_have_no_case():
    raw = {
        "gradient_allreduce_op": "SUM",
        "checkpoint": {"tag_validation": "FAIL"},
        "scheduler": {"type": "warmuplr", "params": {"warmup_type": "LINEAR"}},
        **zero3(offload_param={"device": "CPU"}),
    }
    config = load_config(raw)
    assert config.gradient_allreduce_op == "sum" and config.checkpoint.tag_validation == "Fail"
    assert (config.scheduler.type, config.scheduler.params.warmup_type) == ("WarmupLR", "linear")
    assert config.zero_optimization.offloads_params


def test_a_sub_group_of_size_0_is_all_at_once():
    assert load_config(zero3(sub_group_size=0)).zero_optimization.sub_group_size == sys.maxsize


# ---- the table


def test_the_screen_shows_what_is_not_at_its_default_and_names_the_file(
    tmp_path, capsys, monkeypatch
):
    """Of what the Trainer and accelerate pass on."""
    given = {"steps_per_print": float("inf"), "bf16": {"enabled": True}, "gradient_clipping": 1.0}
    monkeypatch.setattr(sys, "argv", ["train.py", f"--output_dir={tmp_path / 'out'}"])
    config = load_config(given | zero3())
    announce(config)
    announce(config)
    first, _, *lines, last = capsys.readouterr().err.splitlines()
    assert first == "zero is the engine of this run, with these settings:"
    shown = "gradient_clipping steps_per_print zero_optimization.stage bf16.enabled"
    assert [line.split()[0] for line in lines] == shown.split()
    path = tmp_path / "out" / "zero_config.txt"
    assert last == f"all other keys are at their defaults; {path} lists them"
    assert len(path.read_text().splitlines()) > 100


def test_clipping_that_nobody_asked_for_is_on_the_screen():
    """Older DeepSpeeds did not clip by default."""
    shown = rows(load_config({"train_batch_size": 1}), everything=False)
    assert shown["gradient_clipping"] == ["-", "1.0", "default"]


def test_of_the_loss_scale_types_and_signs_are_checked_where_it_is_not_dynamic():
    scale = {"initial_scale_power": 200, "min_loss_scale": 0, "hysteresis": 0}
    assert not load_config({"fp16": {"enabled": False, **scale}}).fp16.enabled
    assert load_config({"fp16": {"enabled": True, "loss_scale": 128, **scale}}).fp16.enabled
    assert len(errors({"fp16": {"enabled": True, **scale}})) == 3
    wrong = {"loss_scale": "dynamic", "initial_scale_power": 1.5, "hysteresis": -1}
    lines = errors({"fp16": {"enabled": False, "consecutive_hysteresis": 3, **wrong}})
    names = ["loss_scale", "initial_scale_power", "hysteresis", "consecutive_hysteresis"]
    assert [line.split(":")[0] for line in lines] == [f"fp16.{name}" for name in names]


def test_every_row_is_true():
    sections = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    sections["scheduler"] = {"type": "WarmupLR", "params": {}}
    table = rows(load_config({"train_batch_size": 4, **sections, **zero3()}).resolve(2))
    assert table["train_batch_size"] == ["4", "4", "configuration"]
    assert table["train_micro_batch_size_per_gpu"] == ["-", "2", "default"]
    assert table["zero_optimization.overlap_comm"] == ["-", "true", "default"]
    assert table["optimizer.params.betas"] == ["-", "[0.9, 0.999]", "default"]
    assert not table.keys() & {"optimizer.params.nesterov", "scheduler.params.cycle_min_lr"}
    assert "none: no other value is available" in table["zero_optimization.compute_grad_norm"][-1]
    assert table["fp16.hysteresis"][3] == "none: the section is not enabled"
    offloaded = {"stage": 2, "offload_param": {"device": "cpu"}}
    table = rows(load_config({"zero_optimization": offloaded}))
    effect = table["zero_optimization.offload_param.device"][3]
    assert effect == "none: needs stage 3, and this is stage 2"
