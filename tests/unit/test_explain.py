"""zero explain: every key of a file is explained once, and the advice fits the configuration."""

import json
import re
from pathlib import Path

import pytest

from tests.unit.configurations import zero3
from zero.__main__ import main
from zero.config.explain import RULES, explain, explain_as_json

SHIPPED = Path(__file__).parents[2] / "configs" / "ds_config_zero3.json"


def leaves(value, path=""):
    if not isinstance(value, dict):
        return [path]
    return [leaf for key, each in value.items() for leaf in leaves(each, f"{path}.{key}".lstrip("."))]


@pytest.mark.parametrize("file", sorted(SHIPPED.parent.glob("*.json")), ids=lambda file: file.name)
def test_every_key_of_a_shipped_file_is_explained_once(file):
    text = explain(str(file))
    assert sorted(re.findall(r"^  (\S+) = ", text, re.MULTILINE)) == sorted(leaves(json.loads(file.read_text())))
    assert "None" not in text


def explained(config, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    found = json.loads(explain_as_json(str(file)))
    return found, {entry["key"]: entry for entry in found["keys"]}


def test_each_key_is_in_the_group_where_it_belongs(tmp_path):
    config = {
        "train_batch_size": 8,
        "gradient_clipping": "auto",
        "_note": 1,
        "fp16": {"enabled": "auto", "hysteresis": 3},
    }
    config |= {"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 5, "reduce_scatter": True}}
    found, keys = explained(config, tmp_path)
    assert keys["train_batch_size"]["group"] == "Keys that act"
    assert keys["gradient_clipping"]["text"].endswith("Becomes: max_grad_norm.")
    assert keys["fp16.hysteresis"]["text"].endswith("Acts if fp16.enabled becomes true.")
    assert keys["zero_optimization.stage3_max_live_parameters"]["text"] == "No effect: acts at stage 3, this is 2."
    assert keys["zero_optimization.reduce_scatter"]["group"] == "Keys without effect"
    assert found["unknown"] == ["_note"]
    assert found["summary"].startswith("optimizer state and gradients are sharded (stage 2)")


NVME = {"device": "nvme", "nvme_path": "/tmp", "pin_memory": True, "pipeline_read": True}
# A configuration, and words of the advice that only this configuration gets.
ADVICE = [
    ({"zero_optimization": {"stage": 1}}, "stage 2 also shards gradients"),
    ({"zero_optimization": {"stage": 2}}, "stage 3 also shards parameters"),
    (zero3(), "offload_optimizer"),
    (zero3(offload_optimizer={"device": "cpu"}), "offload_param"),
    (zero3(), "bf16"),
    (zero3(offload_param={"device": "cpu", "pin_memory": False}), "pin_memory true"),
    (zero3(offload_optimizer=NVME), "pipeline_read and pipeline_write"),
    (zero3(offload_optimizer=NVME), '"cpu" instead of "nvme"'),
    (zero3(stage3_prefetch_bucket_size=0), "stage3_prefetch_bucket_size above 0"),
    (zero3(stage3_max_reuse_distance=0), "stage3_max_reuse_distance above 0"),
    (zero3(overlap_comm=False), "overlap_comm true"),
    ({"wall_clock_breakdown": True}, "wall_clock_breakdown false"),
    (zero3() | {"fp16": {"enabled": True}}, "overflow in fp16"),
    (zero3(), "stage3_gather_16bit_weights_on_model_save true"),
    ({"gradient_clipping": 0.0}, "gradient_clipping 1.0"),
]
# There is no advice for this one.
GOOD = zero3(
    offload_optimizer={"device": "cpu", "pin_memory": True},
    offload_param={"device": "cpu", "pin_memory": True},
    stage3_gather_16bit_weights_on_model_save=True,
) | {"bf16": {"enabled": True}}


@pytest.mark.parametrize(("config", "words"), ADVICE)
def test_advice_fits_the_configuration(config, words, tmp_path):
    found, _ = explained(config, tmp_path)
    assert words in " ".join(text for texts in found["advice"].values() for text in texts)


def test_every_rule_is_tested_and_none_applies_to_a_good_configuration(tmp_path):
    assert len(ADVICE) == len(RULES)
    assert explained(GOOD, tmp_path)[0]["advice"] == {}


def test_the_command(tmp_path, capsys):
    main(["explain", str(SHIPPED)])
    assert capsys.readouterr().out.startswith(f"{SHIPPED}: optimizer state, gradients and parameters are sharded")
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(tmp_path / "none.json")])
    assert ended.value.code == 2 and "none.json" in capsys.readouterr().err
