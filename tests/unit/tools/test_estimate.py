"""`zero estimate` as a user calls it: what it computes for which model, and what it proposes."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from zero.config import load_config
from zero.tools.cli import main
from zero.tools.estimate.model import build, class_of
from zero.tools.estimate.question import Question
from zero.tools.estimate.rank import Estimate, estimate
from zero.tools.estimate.remedies import Remedy, _undominated
from zero.tools.estimate.report import _times

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
HEADS = {"num_key_value_heads": 4}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
BATCH, LENGTH = 2, 24


def llama(**sizes: Any) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**SIZES | HEADS | sizes, architectures=["LlamaForCausalLM"])


def counted(
    shape: transformers.PretrainedConfig,
    checkpointing: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    settings = load_config({"zero_optimization": {"stage": 0}})
    question = Question(1, BATCH, LENGTH, checkpointing)
    return estimate(build(shape, dtype), settings, question).traffic.operations


def products(model: torch.nn.Module) -> int:
    """Operations of a forward in linear layers."""
    linear = (module for module in model.modules() if isinstance(module, torch.nn.Linear))
    return 2 * BATCH * LENGTH * sum(module.weight.numel() for module in linear)


def test_operations_are_those_of_the_products():
    shape = llama()
    attention = 4 * BATCH * LENGTH * LENGTH * 64 * 2  # both layers
    linear = products(build(shape, torch.bfloat16))
    # Backward has two products for each of linear layers, and five for the two of fused attention.
    assert counted(shape) == 3 * linear + 3.5 * attention
    # Blocks are computed again, but for their last product. The head is no block.
    once = 2 * BATCH * LENGTH * (64 * 128 + 2 * 64 * 96)
    assert counted(shape, True) == 4 * linear - once + 4.5 * attention


def test_only_active_experts_compute():
    def mixture(experts: int, active: int, dtype: torch.dtype = torch.bfloat16) -> int:
        sizes = {
            "num_local_experts": experts,
            "num_experts_per_tok": active,
            "architectures": ["MixtralForCausalLM"],
        }
        return counted(transformers.MixtralConfig(**SIZES | HEADS | sizes), dtype=dtype)

    of_an_expert = 3 * 2 * BATCH * LENGTH * 2 * 3 * 64 * 96
    assert mixture(8, 2) - mixture(8, 1) == of_an_expert
    router = 3 * 2 * BATCH * LENGTH * 2 * 64 * 8
    assert mixture(16, 2) - mixture(8, 2) == router
    assert mixture(8, 2, torch.float32) == mixture(8, 2, torch.float16) == mixture(8, 2)


@pytest.fixture
def ask(tmp_path, capsys) -> Callable[..., Any]:
    """Call the command for a model's configuration and a ds_config.json.

    Returns the text, or what --json gives.
    """

    def call(
        shape: transformers.PretrainedConfig, section: dict[str, Any], *options: str, **others: Any
    ) -> Any:
        shape.save_pretrained(tmp_path / "model")
        settings = {"bf16": {"enabled": True}, "zero_optimization": section} | others
        (tmp_path / "ds.json").write_text(json.dumps(settings))
        main(
            [
                "estimate",
                str(tmp_path / "model"),
                "--ds-config",
                str(tmp_path / "ds.json"),
                *options,
            ]
        )
        text = capsys.readouterr().out
        return json.loads(text) if "--json" in options else text

    return call


def refusal(capsys: pytest.CaptureFixture[str], call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        call(*arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (transformers.LlamaConfig(**SIZES), "LlamaForCausalLM"),
        (transformers.T5Config(**T5, decoder_start_token_id=0), "T5ForConditionalGeneration"),
        (transformers.ViTConfig(), "ViTModel"),
        (transformers.LlamaConfig(**SIZES, architectures=["MyModel"]), "LlamaForCausalLM"),
    ],
)
def test_without_a_known_class_the_type_decides(shape, name, ask):
    kind, is_named = class_of(shape)
    assert kind.__name__ == name and not is_named
    assert f"this is a {name}" in ask(shape, {"stage": 3})
    assert ask(shape, {"stage": 3}, "--json")["class"] == name


def test_an_encoder_decoder_has_activations(ask):
    shape = transformers.T5Config(
        **T5, decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"]
    )
    found = ask(shape, {"stage": 3}, "--json", "--batch", "2", "--seq", "8")
    assert (
        found["with_checkpointing"]["activations"] < found["without_checkpointing"]["activations"]
    )


def test_both_ways_of_checkpointing(ask):
    options = ["--batch", "16", "--seq", "32", "--world", "2", "--json"]
    plain, less = (
        ask(llama(), {"stage": 3}, *options, *more) for more in ([], ["--checkpointing"])
    )
    for key in ("with_checkpointing", "without_checkpointing"):
        assert plain[key] == less[key]
    assert plain["with_checkpointing"]["device"] < plain["without_checkpointing"]["device"]
    assert plain["with_checkpointing"]["seconds"] == less["seconds"] > plain["seconds"]
    assert sum(less["bytes"]["device"].values()) == less["with_checkpointing"]["device"]
    text = ask(llama(), {"stage": 3}, *options[:-1])
    assert "With gradient checkpointing: " in text
    assert "Without gradient checkpointing: " in ask(
        llama(), {"stage": 3}, *options[:-1], "--checkpointing"
    )


def test_the_batch_may_come_from_the_file(ask, capsys):
    seq = ["--seq", "16", "--json"]
    given = ask(llama(), {"stage": 3}, "--batch", "4", *seq)
    assert ask(llama(), {"stage": 3}, *seq, train_micro_batch_size_per_gpu=4) == given
    assert ask(llama(), {"stage": 3}, *seq, train_batch_size=8, gradient_accumulation_steps=2)[
        "fits"
    ]
    assert "train_micro_batch_size_per_gpu" in refusal(capsys, ask, llama(), {"stage": 3}, *seq)
    assert "--batch needs --seq" in refusal(capsys, ask, llama(), {"stage": 3}, "--batch", "4")


def test_other_inputs_than_tokens_are_named(ask, capsys):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vit = transformers.ViTConfig(
        **sizes, image_size=8, patch_size=4, architectures=["ViTForImageClassification"]
    )
    options = ["--batch", "2", "--seq", "8"]
    assert "takes pixel_values, not token ids" in refusal(capsys, ask, vit, {"stage": 3}, *options)
    bare = llama()
    bare.architectures = ["LlamaModel"]
    assert "LlamaModel has no loss" in refusal(capsys, ask, bare, {"stage": 3}, *options)


def parts(found: dict[str, Any], place: str) -> int:
    return sum(found["bytes"][place].values())


def test_a_part_of_the_optimizer_is_offloaded_if_that_is_enough(ask):
    cpu, shape = {"device": "cpu"}, llama(num_hidden_layers=16)
    stage = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": cpu}
    options = ["--batch", "1", "--seq", "8", "--world", "2", "--json"]
    sections = stage, stage | {"offload_optimizer": cpu}
    most, least = (parts(ask(shape, section, *options), "device") for section in sections)
    limit = (most + least) // 2
    remedies = ask(shape, stage, *options, "--device-memory", str(limit / 2**30))["remedies"]
    best = remedies[0]
    assert best["change"].startswith("the optimizer offloaded to cpu (ratio")
    ratio = float(best["change"].partition("ratio ")[2].partition(")")[0])

    def with_ratio(part: float) -> dict[str, Any]:
        return ask(shape, stage | {"offload_optimizer": cpu | {"ratio": part}}, *options)

    found = with_ratio(ratio)
    assert (parts(found, "device"), parts(found, "host")) == (best["device"], best["host"])
    assert parts(with_ratio(ratio - 0.05), "device") > limit >= best["device"]


def test_whole_tensors_move_to_their_owners_only_if_they_are_sharded(ask):
    muon = {"type": "Muon", "params": {"lr": 1e-3}}
    alone, one, sharded = (
        ask(llama(), {"stage": stage}, "--world", world, "--json", optimizer=muon)["bytes"][
            "device"
        ]
        for stage, world in ((0, "2"), (2, "1"), (2, "2"))
    )
    elements = sum(param.numel() for param in build(llama(), torch.bfloat16).parameters())
    # Gradients get 4 bytes. The eight square matrices are the largest batch: 4 bytes for the
    # update, 6 for matrices and 4 for products. A tensor that moves has 8 on its owner, and as many
    # are sent and received.
    for unsharded in (alone, one):
        whole = unsharded["whole tensors of the optimizer"]
        assert whole == pytest.approx(4 * elements + 8 * 14 * 64 * 64, rel=1e-3)
    assert 4 * elements < sharded["whole tensors of the optimizer"] < 24 * elements


def test_a_slower_remedy_needs_less_memory_or_fewer_settings():
    def remedy(seconds: float, memory: int, settings: int) -> Remedy:
        found = SimpleNamespace(total=lambda place: memory, seconds=seconds)
        return Remedy("", found, settings)

    fast, smaller, simpler = remedy(1, 50, 3), remedy(2, 40, 3), remedy(3, 90, 1)
    useless = [remedy(2.5, 45, 3), remedy(4, 39, 2)]
    assert _undominated([*useless, simpler, smaller, fast], {"device": 100}) == [
        fast,
        smaller,
        simpler,
    ]
    many = [remedy(2 + number / 10, 40 - 5 * number, 3) for number in range(6)]
    assert _undominated([*many, simpler, fast], {"device": 100}) == [fast, *many[:3], simpler]


def test_files_are_a_remedy_for_too_little_host_memory(ask):
    shape = llama(hidden_size=512, intermediate_size=1536, vocab_size=2048)
    section = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    limits = ["--device-memory", "40M", "--host-memory", "60M"]
    found = ask(shape, section, "--world", "2", "--json", *limits, aio={"queue_depth": 4})
    assert not found["fits"]
    best = next(each for each in found["remedies"] if "nvme" in each["change"])
    assert best["host"] <= 60 << 20 < parts(found, "host") and best["disk"] > 0
    text = ask(shape, section, "--world", "2", *limits, aio={"queue_depth": 4})
    assert (
        "does not fit into host memory of 60.00 MiB; the largest part: optimizer state" in text
        and "on disk" in text
    )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_hidden_layers", -2, "num_hidden_layers is -2"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1e+09"),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("num_attention_heads", 7, "not a multiple"),
        ("num_key_value_heads", 3, "num_key_value_heads is 3"),
        ("num_key_value_heads", -(10**9), "num_key_value_heads"),
        ("vocab_size", 2**31, "vocab_size is 2.15e+09"),
        ("vocab_size", 2**63, "vocab_size"),
        ("hidden_size", "64", "hidden_size"),
        ("intermediate_size", -1, "LlamaForCausalLM cannot be built"),
        ("head_dim", 2**31, "head_dim"),
        ("num_labels", 10**9, "num_labels"),
        ("architectures", 1.5, "architectures is 1.5"),
        ("architectures", [1, 2], "architectures is [1, 2]"),
    ],
)
def test_absurd_values_of_a_model_are_refused_in_one_line(key, value, words, tmp_path, capsys):
    shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, **HEADS}
    (tmp_path / "config.json").write_text(json.dumps(shape | {key: value}))
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    arguments = ["estimate", str(tmp_path), "--ds-config", str(tmp_path / "ds.json")]
    assert words in refusal(capsys, main, arguments)


def test_a_name_on_the_hub_is_refused_with_the_command_that_gets_it(tmp_path, capsys):
    (tmp_path / "ds.json").write_text("{}")
    name = "meta-llama/Llama-3.1-8B"
    error = refusal(capsys, main, ["estimate", name, "--ds-config", str(tmp_path / "ds.json")])
    assert f"hf download {name} config.json --local-dir Llama-3.1-8B" in error
    assert "zero estimate Llama-3.1-8B" in error


@pytest.mark.parametrize(
    ("new", "old", "words"),
    [
        (0.67, 0.7, "0.67 s instead of 0.70 s"),
        (209.0, 210.4, "209 s instead of 210 s"),
        (1.704, 0.67, "1.7 s instead of 0.67 s"),
        (210.1, 210.4, "210 s either way"),
    ],
)
def test_two_times_have_as_many_digits_as_show_the_difference(new, old, words):
    assert _times(Estimate(1, seconds=new), Estimate(1, seconds=old)) == words


def test_speeds_can_be_given(ask):
    section = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"},
        "offload_param": {"device": "cpu"},
    }
    shape = llama(hidden_size=512, intermediate_size=1536, vocab_size=2048)
    options = ["--batch", "2", "--seq", "8"]
    slow = ask(shape, section, *options, "--json")
    fast = ask(shape, section, *options, "--disk-speed", "5", "--json")
    links = slow["traffic"]
    disk = sum(sum(links[link].values()) for link in ("disk read", "disk written"))
    assert slow["seconds"] - fast["seconds"] == pytest.approx(disk * (1 - 1 / 5) / 1e9)
    assert slow["tokens_per_second"] == pytest.approx(16 / slow["seconds"])
    text = ask(shape, section, *options, "--disk-speed", "5", "--memory-speed", "50")
    assert "disk 5 GB/s, memory 50 GB/s" in text and " tokens/s" in text


def test_an_update_on_the_host_takes_the_time_of_the_bytes_that_it_moves(ask):
    cpu = {"device": "cpu"}
    both = {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    shape = llama(hidden_size=512, intermediate_size=1536, vocab_size=2048)
    found = ask(shape, both, "--json")
    # In bf16: a gradient is read, masters and two moments are read and written, weights written.
    assert found["host_memory_of_updates"] == pytest.approx(28 * found["elements"], rel=1e-3)
    coded = ask(shape, both | {"zero_quantized_moments": True}, "--json")
    assert coded["host_memory_of_updates"] == pytest.approx(16 * found["elements"], rel=0.02)


# Runs on one H100 (benchmarks/RESULTS.md): seconds of a step.
MEASURED = {
    "T5-3B": (
        transformers.T5Config(
            d_model=1024, d_ff=16384, d_kv=128, num_heads=32, num_layers=24, vocab_size=32128,
            decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"],
        ), {}, 8, 512, False, 1.04,
    ),
    "Llama 8B": (
        transformers.LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
            architectures=["LlamaForCausalLM"],
        ), {"zero_quantized_moments": True}, 4, 2048, True, 3.10,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_predicted_seconds_are_near_those_of_a_gpu(name):
    shape, section, batch, length, checkpointing, seconds = MEASURED[name]
    cpu = {"device": "cpu"}
    both = {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    settings = {"bf16": {"enabled": True}, "zero_optimization": both | section}
    question = Question(1, batch, length, checkpointing)
    found = estimate(build(shape, torch.bfloat16), load_config(settings), question)
    assert seconds / 1.5 < found.seconds < seconds * 1.5


def test_offload_that_is_not_needed_is_named(ask):
    cpu = {"device": "cpu"}
    both = {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    shape = llama(hidden_size=512, intermediate_size=1536, vocab_size=2048)
    options = ["--batch", "2", "--seq", "8", "--device-memory"]
    text = ask(shape, both, *options, "1G")
    assert "The offload is not needed: " in text and " of 1.00 GiB are in use" in text
    found = ask(shape, both, *options, "1G", "--json")
    plain = ask(shape, {"stage": 3}, *options[:-1], "--json")
    unneeded = found["not_needed"]
    assert unneeded["seconds"] < found["seconds"] and unneeded["host"] == 0
    assert unneeded["device"] == parts(plain, "device") > parts(found, "device")
    # The optimizer does not fit, the parameters do: with few live ones they are copied twice.
    optimizer = {"stage": 3, "offload_optimizer": cpu, "stage3_max_live_parameters": 0}
    both = optimizer | {"offload_param": cpu}
    enough = parts(ask(shape, optimizer, *options[:-1], "--json"), "device")
    less = ask(shape, both, *options, str((enough + 1024) / 2**30), "--json")["not_needed"]
    assert less["change"] == "offload of parameters" and less["device"] == enough
    assert ask(shape, both, "--json")["not_needed"] is None


def test_less_precise_states_are_a_remedy_where_nothing_else_in_memory_is_enough(ask):
    shape = llama(hidden_size=512, intermediate_size=1536, vocab_size=2048)
    limits = ["--device-memory", "40M", "--host-memory", "84M"]
    found = ask(shape, {"stage": 3}, "--json", *limits)
    lean = [each for each in found["remedies"] if "bf16_master_weights_and_grads" in each["change"]]
    assert lean and "at random" in lean[0]["price"] and "8 bits" in lean[0]["price"]
    assert lean[0]["disk"] == 0 and lean[0]["host"] <= 84 << 20
    assert "(the price: the optimizer's moments have 8 bits" in ask(shape, {"stage": 3}, *limits)
    enough = ask(shape, {"stage": 3}, "--json", "--device-memory", "40M")["remedies"]
    assert enough and not any(each["price"] for each in enough)


def test_states_without_masters_are_estimated_on_the_device(ask):
    lean = {"enabled": True, "bf16_master_weights_and_grads": True}
    found = ask(llama(), {"stage": 3}, "--json", bf16=lean)["bytes"]["device"]
    assert "masters" not in found and found["optimizer state"] > 0
