"""zero explain: every key of a file is explained once, by a sentence about its value."""

import json
import re
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import ConfigDict, TypeAdapter

from tests.unit.configurations import all_keys, zero3
from zero.tools.cli import main
from zero.tools.explain import explain

SHIPPED = Path(__file__).parents[3] / "configs" / "ds_config_zero3.json"


def in_a_line(file: Path) -> str:
    return " ".join(explain(str(file)).split())


def leaves(value, path=""):
    if not isinstance(value, dict):
        return [path]
    return [
        leaf for key, each in value.items() for leaf in leaves(each, f"{path}.{key}".lstrip("."))
    ]


@pytest.mark.parametrize("file", sorted(SHIPPED.parent.glob("*.json")), ids=lambda file: file.name)
def test_every_key_of_a_shipped_file_is_explained_once(file):
    text = explain(str(file))
    assert max(map(len, text.splitlines())) <= 100
    assert sorted(re.findall(r"^  (\S+) = ", text, re.MULTILINE)) == sorted(
        leaves(json.loads(file.read_text()))
    )
    assert "None" not in text


def explained(config, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    found = json.loads(explain(str(file), as_json=True))
    return found, {entry["key"]: entry for entry in found["keys"]}


def test_each_key_is_in_the_group_where_it_belongs(tmp_path):
    stage2 = {"stage": 2, "stage3_max_live_parameters": 5, "reduce_scatter": True}
    config = {
        "train_batch_size": 8,
        "gradient_clipping": "auto",
        "_note": 1,
        "fp16": {"enabled": "auto", "hysteresis": 3},
        "zero_optimization": {**stage2, "sub_group_size": "auto"},
    }
    found, keys = explained(config, tmp_path)
    assert keys["train_batch_size"]["group"] == "Keys with an effect"
    assert keys["zero_optimization.reduce_scatter"]["group"] == "Keys without effect"
    assert found["unknown"] == ["_note"]
    for key, end in {
        "gradient_clipping": "Becomes: --max_grad_norm of the Trainer (default 1.0).",
        "zero_optimization.sub_group_size": "Without a Trainer: 1000000000, its default.",
        "fp16.hysteresis": "Has an effect only if fp16.enabled becomes true.",
        "zero_optimization.stage3_max_live_parameters": "needs stage 3, and this is stage 2.",
    }.items():
        assert keys[key]["text"].endswith(end)


@pytest.mark.parametrize(("ranks", "is_refused"), [(2, True), (8, False)])
def test_settings_without_which_experts_cannot_stay_are_named(ranks, is_refused, tmp_path):
    file, experts = tmp_path / "ds.json", {"enabled": True, "autoep_size": 4}
    file.write_text(json.dumps({"expert_parallel": experts} | zero3(mics_shard_size=ranks)))
    refusal = r"An engine refuses this: .*mics_shard_size.*: delete one of them\."
    assert bool(re.search(refusal, in_a_line(file))) is is_refused


NVME = {"device": "nvme", "nvme_path": "/tmp", "pin_memory": True, "pipeline_read": True}
AIO = {"aio": {"block_size": 1 << 18}}
IN_MEMORY = zero3(offload_param={"device": "none"})
SIZES = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
# A key, a configuration that has it, and words that a reader of this value needs.
VALUES = [
    ("stage", IN_MEMORY, "A block is gathered for its forward"),
    ("sub_group_size", zero3(sub_group_size=0), "updates all elements at once."),
    ("reduce_bucket_size", zero3(reduce_bucket_size=5e8), "954 MiB in 16 bits, 1.86 GiB in fp32."),
    ("aio.block_size", zero3(offload_optimizer=NVME) | AIO, "256 KiB."),
    ("fp16.initial_scale_power", {"fp16": {"enabled": True, "initial_scale_power": 16}}, "65,536."),
    ("wall_clock_breakdown", {"wall_clock_breakdown": False}, "Off. If true: After each"),
    ("gradient_clipping", {"gradient_clipping": 0}, "Gradients are not clipped."),
    ("train_batch_size", {"train_batch_size": 64, **SIZES}, "needs 4 process"),
    ("train_batch_size", {"train_batch_size": 64}, "64 samples. Other batch sizes follow"),
    ("zero_force_ds_cpu_optimizer", {"zero_force_ds_cpu_optimizer": True}, "substitutes"),
]


@pytest.mark.parametrize(("key", "config", "words"), VALUES)
def test_the_text_is_about_the_value(key, config, words, tmp_path):
    keys = explained(config, tmp_path)[1]
    assert words in (keys.get(key) or keys[f"zero_optimization.{key}"])["text"]


def test_a_file_of_accelerate_names_the_configuration_or_has_its_keys(tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text(f"deepspeed_config:\n  deepspeed_config_file: {SHIPPED}\n")
    assert explain(str(file)).partition(":\n")[2] == explain(str(SHIPPED)).partition(":\n")[2]
    file.write_text(
        "mixed_precision: fp16\ndeepspeed_config:\n  zero_stage: 3\n  offload_param_device: cpu\n"
        "  deepspeed_multinode_launcher: standard\n"
    )
    text = in_a_line(file)
    assert "zero_optimization.stage = 3" in text and "fp16.enabled = true" in text
    assert "zero_optimization.offload_param.device = " in text
    assert "cast them in the script" in text  # accelerate writes fp16.auto_cast
    file.write_text("distributed_type: MULTI_GPU")
    with pytest.raises(ValueError, match="accelerate.yaml: "):
        explain(str(file))


def value_in(word):
    try:
        return json.loads(word)
    except ValueError:
        return word


def test_each_sentence_about_a_value_is_about_a_valid_one():
    """A sentence about a misspelt value would never be shown."""
    adapters, count = {}, 0
    for section, key in all_keys():
        field = section.model_fields[key]
        for word in section.describe(key)[1].keys() - {"N"}:
            if (section, key) not in adapters:
                kinds = (field.annotation, *field.metadata)
                kind = Annotated[kinds] if field.metadata else field.annotation
                adapters[section, key] = TypeAdapter(kind, config=ConfigDict(strict=True))
            adapters[section, key].validate_python(value_in(word))
            count += 1
    assert count > 40


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    file = tmp_path / "ds.json"
    file.write_text('{"wandb": {"enabled": true}}')
    for found in (None, object()):
        monkeypatch.setattr("zero.tools.explain.find_spec", lambda package, found=found: found)
        assert ("The package wandb is not installed here" in explain(str(file))) == (found is None)


def test_the_command(capsys):
    main(["explain", str(SHIPPED)])
    assert capsys.readouterr().out.startswith(f"{SHIPPED}:\n")
