"""`zero estimate` as a user calls it: what it computes for which model, and what it proposes."""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from benchmarks.estimate.seconds import ON_H100
from zero.comm.traffic import READ, WRITTEN
from zero.config import load_config
from zero.tools.cli import main
from zero.tools.estimate import calls
from zero.tools.estimate import remedies as remedies_of_estimate
from zero.tools.estimate import report as report_of_estimate
from zero.tools.estimate.machine import _on_host
from zero.tools.estimate.model import build
from zero.tools.estimate.question import PLAIN, Question
from zero.tools.estimate.rank import Estimate, estimate
from zero.tools.estimate.remedies import Search
from zero.tools.estimate.speeds import Speeds, default_file, of_device, read
from zero.tools.estimate.traffic import FORWARD, ON_HOST, OPERATIONS, UPDATES, Traffic


@pytest.fixture(autouse=True)
def no_measured_speeds(tmp_path, monkeypatch):
    """Whatever this machine's user has measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setattr("zero.tools.estimate.command._SECONDS", 1e9)  # no progress on stderr


SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 128,
}  # fmt: skip
HEADS = {"num_key_value_heads": 4}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
BATCH, LENGTH = 2, 24
# Of a model whose parts differ enough to be told apart.
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 2048}
CPU = {"device": "cpu"}
OFFLOADED = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}


def llama(**sizes: Any) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**SIZES | HEADS | sizes, architectures=["LlamaForCausalLM"])


def mixtral(**sizes: Any) -> transformers.PretrainedConfig:
    sizes = SIZES | HEADS | sizes
    return transformers.MixtralConfig(**sizes, architectures=["MixtralForCausalLM"])


def estimated(
    shape: transformers.PretrainedConfig, question: Question, stage: int = 3, **sections: Any
) -> Estimate:
    """With bf16, unless `sections` have another dtype."""
    config = load_config(
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}} | sections
    )
    return estimate(build(shape, config.compute_dtype), config, question)


def counted(shape: transformers.PretrainedConfig, checkpointing: bool = False, **dtype: Any) -> int:
    question = Question(1, BATCH, LENGTH, checkpointing)
    return estimated(shape, question, 0, **dtype).traffic.operations


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
    def mixture(experts: int, active: int, **dtype: Any) -> int:
        return counted(mixtral(num_local_experts=experts, num_experts_per_tok=active), **dtype)

    of_an_expert = 3 * 2 * BATCH * LENGTH * 2 * 3 * 64 * 96
    assert mixture(8, 2) - mixture(8, 1) == of_an_expert
    router = 3 * 2 * BATCH * LENGTH * 2 * 64 * 8
    assert mixture(16, 2) - mixture(8, 2) == router
    for bf16, fp16 in ((False, False), (False, True)):
        dtype = {"bf16": {"enabled": bf16}, "fp16": {"enabled": fp16}}
        assert mixture(8, 2, **dtype) == mixture(8, 2)


@pytest.fixture
def ask(tmp_path, capsys) -> Callable[..., Any]:
    """Call the command for a model's configuration and a ds_config.json.

    Returns the text, or what --json gives.
    """

    def call(
        shape: transformers.PretrainedConfig, section: dict[str, Any], *options: str, **others: Any
    ) -> Any:
        model, file = tmp_path / "model", tmp_path / "ds.json"
        shape.save_pretrained(model)
        settings = {"bf16": {"enabled": True}, "zero_optimization": section} | others
        file.write_text(json.dumps(settings))
        main(["estimate", str(model), "--ds-config", str(file), *options])
        text = capsys.readouterr().out
        return json.loads(text) if "--json" in options else text

    return call


def refusal(capsys: pytest.CaptureFixture[str], call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        call(*arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    return error


def test_an_encoder_decoder_has_activations(ask):
    shape = transformers.T5Config(
        **T5, decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"]
    )
    options = ["--json", "--batch", "16", "--seq", "32"]
    plain, less = (ask(shape, {"stage": 3}, *options, *more) for more in ([], ["--checkpointing"]))
    assert less["activations"] < plain["activations"] and less["seconds"] > plain["seconds"]
    enough = ["--device-memory", str(parts(less, "device") / 2**30)]
    first, *others = ask(shape, {"stage": 3}, *options, *enough)["remedies"]
    assert first["change"] == "gradient checkpointing"
    assert others and first["seconds"] <= min(each["seconds"] for each in others)


def test_codes_are_gathered_as_many_bytes_with_activations_and_without(ask):
    shape = llama(hidden_size=512, intermediate_size=1024)
    shape.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    stage3 = {"stage": 3, "stage3_prefetch_bucket_size": 30000}
    options = ["--adapter", "8", "--world", "2", "--json"]
    gathered = [
        ask(shape, stage3, *options, *more)["bytes"]["device"]["gathered parameters"]
        for more in ([], ["--batch", "1", "--seq", "8"])
    ]
    assert gathered[0] == gathered[1] > 0


def test_the_batch_may_come_from_the_file(ask):
    seq = ["--seq", "16", "--json"]
    given = ask(llama(), {"stage": 3}, "--batch", "4", *seq)
    assert ask(llama(), {"stage": 3}, *seq, train_micro_batch_size_per_gpu=4) == given
    options = ["--batch", "4", *seq]
    assert ask(llama(), {"stage": 3}, *options, train_micro_batch_size_per_gpu=2) == given
    whole = {"train_batch_size": 8, "gradient_accumulation_steps": 2}
    assert ask(llama(), {"stage": 3}, *seq, **whole)["fits"]


def test_other_inputs_than_tokens_have_no_activations(ask, capsys):
    """States are estimated, also where the model's constructor looks at values."""
    shape = transformers.ViTConfig(**SIZES, image_size=8, patch_size=4)
    shape.architectures = ["ViTForImageClassification"]
    vit = transformers.ViTForImageClassification(shape)
    elements = sum(param.numel() for param in vit.parameters())
    assert ask(shape, {"stage": 3}, "--json")["elements"] == elements
    options = ["--batch", "2", "--seq", "8"]
    says = "takes pixel_values, not token ids"
    assert says in refusal(capsys, ask, shape, {"stage": 3}, *options)
    bert = transformers.BertConfig(**SIZES, architectures=["BertForSequenceClassification"])
    assert ask(bert, {"stage": 3}, *options, "--json")["activations"] > 0


def parts(found: dict[str, Any], place: str) -> int:
    return sum(found["bytes"][place].values())


def test_files_are_a_remedy_for_too_little_host_memory(ask):
    shape = llama(**LARGE)
    section = {"stage": 3, "offload_optimizer": CPU}
    limits = ["--device-memory", "40M", "--host-memory", "120M"]
    found = ask(shape, section, "--world", "2", "--json", *limits, aio={"queue_depth": 4})
    assert not found["fits"]
    best = next(each for each in found["remedies"] if "nvme" in each["change"])
    assert best["host"] <= 60 << 20 < parts(found, "host") and best["disk"] > 0
    text = ask(shape, section, "--world", "2", *limits, aio={"queue_depth": 4})
    verdict = "This does not fit: each rank has 40 MiB of device memory and 60 MiB of host memory."
    assert text.startswith(f"{verdict}\nEach of 2 ranks needs ")
    assert max(map(len, text.splitlines())) <= 100
    assert "the largest part of host memory: optimizer state" in text
    assert "The 2 ranks of a host hold " in text and "MiB on disk, " in " ".join(text.split())
    assert found["host_memory_of_a_host"] == 2 * parts(found, "host")
    alone = ask(shape, section, "--world", "2", "--json", "--gpus-per-host", "1")
    assert alone["host_memory_of_a_host"] == parts(found, "host")


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    # options, keys of the ds_config.json, keys of the config.json
    ("--seq 16", {}, {}, "train_micro_batch_size_per_gpu"),
    ("--batch 4", {}, {}, "--batch needs --seq"),
    ("--world 4 --gpus-per-host 3", {}, {}, "--gpus-per-host 3"),
    ("--world 2 --batch 2 --seq 16", {"sequence_parallel_size": 2}, {}, "sequence_parallel_size 2"),
    ("--device rtx", {}, {}, "expected some of rtx3090"),
    ("", {}, {"architectures": ["MyModel"]}, "such as LlamaForCausalLM"),
    ("", {}, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ("--batch 2 --seq 8", {}, {"architectures": ["LlamaModel"]}, "LlamaModel has no loss"),
]


@pytest.mark.parametrize(("options", "sections", "shape", "says"), REFUSED)
def test_what_does_not_fit_is_one_line(options, sections, shape, says, tmp_path, capsys):
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, **HEADS}
    (tmp_path / "config.json").write_text(json.dumps(llama | shape))
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}} | sections))
    words = ["--ds-config", str(tmp_path / "ds.json"), *options.split()]
    assert says in refusal(capsys, main, ["estimate", str(tmp_path), *words])
    error = refusal(capsys, main, ["estimate", "meta-llama/Llama-3.1-8B", *words[:2]])
    assert "hf download meta-llama/Llama-3.1-8B config.json --local-dir Llama-3.1-8B" in error


def test_speeds_can_be_given(ask):
    files = {"device": "nvme", "nvme_path": "/tmp", "overlap_step": False, "pipeline_read": False}
    section = {"stage": 3, "offload_optimizer": files, "offload_param": CPU}
    shape, options = llama(**LARGE), ["--batch", "2", "--seq", "8"]
    slow, fast = (
        ask(shape, section, *options, "--disk-speed", speed, "--json") for speed in ("1", "5")
    )
    links = slow["traffic"]
    disk = sum(sum(links[link].values()) for link in ("disk read", "disk written"))
    assert slow["seconds"] - fast["seconds"] == pytest.approx(disk * (1 - 1 / 5) / 1e9)
    assert slow["tokens_per_second"] == pytest.approx(16 / slow["seconds"])
    assert slow["seconds"] == pytest.approx(sum(slow["parts_of_a_step"].values()))
    text = ask(shape, section, *options, "--disk-speed", "5", "--memory-speed", "50")
    assert "disk read 5, disk written 5, memory 50" in " ".join(text.split())
    assert " tokens/s" in text and "2,680" in text


def test_what_the_configuration_lets_overlap_is_not_added(ask):
    shape = llama(**LARGE)
    options = ["--batch", "2", "--seq", "8", "--json"]

    def seconds(**settings: Any) -> float:
        offload = {"device": "nvme", "nvme_path": "/tmp", **settings}
        zero = {"stage": 3, "offload_param": CPU, "offload_optimizer": offload}
        return ask(shape, zero, *options)["seconds"]

    in_step, late = (seconds(overlap_step=each, pipeline_read=False) for each in (False, True))
    assert seconds(overlap_step=True) < late < in_step


@pytest.mark.parametrize(
    "disk, late, has_accelerator, expected",
    [
        (2.0, 1.0, False, 8.0),  # the files, which hide all else
        (16.0, 1.0, False, 3.0),  # all else, which hides the files
        (2.0, 1.0, True, 8.0),
        (16.0, 1.0, True, 2.7),  # the update is behind the forward, which takes 0.3 s
        (2.0, 0.0, False, 9.0),  # in the step: the files, which hide the update
    ],
)
def test_a_step_takes_as_long_as_its_files_or_as_all_else(disk, late, has_accelerator, expected):
    links = {
        READ: Counter({UPDATES: 8 * 10**9, "weights": 4 * 10**9}),
        WRITTEN: Counter({UPDATES: 4 * 10**9}),
    }
    computed = Counter({OPERATIONS: 10**12, FORWARD: 3 * 10**11, ON_HOST: 2 * 10**9})
    traffic = Traffic(defaultdict(Counter, links), computed, late=late, is_pipelined=True)
    speeds = Speeds(
        compute_fp32=1.0, memory=1.0, disk_read=disk, disk_written=disk,
        has_accelerator=has_accelerator,
    )  # fmt: skip
    assert traffic.seconds(speeds, 4) == pytest.approx(expected)


def test_speeds_come_from_a_file_a_device_or_the_usual_place(ask, tmp_path, monkeypatch, capsys):
    def source(*options: str) -> str:
        return ask(llama(), {"stage": 3}, "--json", *options)["speeds"]["source"]

    assert source() == "assumed, an H100"
    usual, other = tmp_path / "cache" / "zero" / "speeds.json", tmp_path / "other.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    usual.parent.mkdir(parents=True)
    usual.write_text('{"speeds": {"memory": 3.5, "source": "measured"}}')
    assert source() == "measured" and read(default_file()).memory == 3.5
    other.write_text('{"speeds": {"source": "elsewhere"}}')
    assert source("--speeds", str(other)) == "elsewhere"
    assert "makers of rtx4090" in source("--device", "RTX 4090")
    card, slower = of_device("rtx4090"), of_device("nvme3, rtx4090, pcie3")
    assert (slower.compute, slower.to_device) == (card.compute, card.to_device / 2)
    other.write_text('{"speeds": {"disc": 1}}')
    assert f"--speeds {other}: " in refusal(capsys, source, "--speeds", str(other))


def test_without_an_accelerator_nothing_is_copied(ask, tmp_path):
    file = tmp_path / "speeds.json"
    file.write_text('{"speeds": {"has_accelerator": false}}')
    found = ask(llama(), OFFLOADED, "--json", "--speeds", str(file))
    assert sum(found["traffic"]["host to device"].values()) > 0
    assert "host to device" not in found["parts_of_a_step"]


def test_an_update_on_the_host_takes_the_time_of_the_bytes_that_it_moves(ask):
    shape = llama(**LARGE)
    found = ask(shape, OFFLOADED, "--json")
    # In bf16: a gradient is read, masters and two moments are read and written, weights written.
    assert found["host_memory_of_updates"] == pytest.approx(28 * found["elements"], rel=1e-3)
    coded = ask(shape, OFFLOADED | {"zero_quantized_moments": True}, "--json")
    assert coded["host_memory_of_updates"] == pytest.approx(16 * found["elements"], rel=0.02)


def test_predicted_seconds_are_near_those_of_a_gpu_and_in_their_order():
    predicted = {run: run.predicted(of_device("h100")).seconds for run in ON_H100}
    for run, seconds in predicted.items():
        assert run.seconds / 1.5 < seconds < run.seconds * 1.5, run.name
        for other in ON_H100:
            if run.name[:8] == other.name[:8] and run.seconds > 1.05 * other.seconds:
                assert seconds > predicted[other], (run.name, other.name)


def test_a_plan_divides_experts_where_that_is_faster(monkeypatch, tmp_path):
    def faster_in_parts(model: Any, config: Any, question: Question) -> Estimate:
        found = estimate(model, config, question)
        found.seconds /= 10 if config.expert_parallel.size == 2 else 1
        return found

    monkeypatch.setattr(remedies_of_estimate, "estimate", faster_in_parts)
    model, out = build(mixtral(num_local_experts=6), torch.bfloat16), tmp_path / "ds_config.json"
    question, limits = Question(4, 1, LENGTH, per_host=4), {"device": 3000000}
    search = Search(model, load_config(PLAIN), question, limits)
    report_of_estimate.plan("model", search, out, as_json=True)
    written = load_config(out)
    assert written.expert_parallel.size == 2 and written.zero_optimization.stage > 0


def test_tensor_parallelism_shares_weights_and_products():
    question = Question(2, BATCH, LENGTH)
    whole, half = (
        estimated(llama(), question, 0, tensor_parallel={"autotp_size": size}) for size in (1, 2)
    )
    assert half.traffic.operations == whole.traffic.operations / 2
    for part in ("parameters", "masters", "optimizer state"):
        expected = whole.parts["device"][part] / 2  # but norms are whole
        assert half.parts["device"][part] == pytest.approx(expected, rel=0.01)
    assert (whole.tokens, half.tokens) == (2 * BATCH * LENGTH, BATCH * LENGTH)


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (3, 4)])
def test_experts_that_stay_are_never_gathered(stage, ranks):
    shape, question = mixtral(num_local_experts=4), Question(ranks, BATCH, LENGTH)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    found = {}
    for size in (1, 2, ranks):
        section = {"enabled": True, "autoep_size": size}
        found[size] = estimated(shape, question, zero_optimization=zero, expert_parallel=section)
    named = build(shape, torch.bfloat16).named_parameters()
    experts = sum(param.nbytes for name, param in named if "experts" in name)
    gathered, stay = found[1], found[ranks]
    assert stay.traffic.operations == gathered.traffic.operations
    assert stay.tokens == gathered.tokens
    masters = [each.parts["device"]["masters"] for each in found.values()]
    assert masters == pytest.approx([masters[0]] * len(masters), rel=0.01)
    if stage == 1:
        less = gathered.parts["device"]["parameters"] - stay.parts["device"]["parameters"]
        assert less == experts // ranks
    network = [each.traffic.links["network"]["gradients"] for each in found.values()]
    # A rank sends the gradients of its experts to the others that have them: to one or none.
    of_experts = experts * (ranks - 1) // ranks
    of_half = experts // 4 if ranks == 4 else 0
    expected = [network[0], network[0] - of_experts + of_half, network[0] - of_experts]
    assert network == expected[: len(network)]


def test_expert_parallelism_shares_experts_and_their_products():
    shape, question = mixtral(num_local_experts=4), Question(2, BATCH, LENGTH)
    parts_of_experts, whole_experts = (
        estimated(shape, question, 1, tensor_parallel={"autotp_size": 2}, **section)
        for section in ({}, {"expert_parallel": {"enabled": True, "autoep_size": 2}})
    )
    # Each rank has a half of each expert, or all of every second one, which gets half the tokens.
    assert whole_experts.traffic.operations == parts_of_experts.traffic.operations
    for part in ("parameters", "masters", "optimizer state"):
        assert whole_experts.parts["device"][part] == parts_of_experts.parts["device"][part]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_call_that_is_known_counts_as_one_that_is_executed(checkpointing):
    sizes = T5 | {"d_model": 64, "d_kv": 64, "d_ff": 128, "num_layers": 3, "vocab_size": 1000}
    shape = transformers.T5Config(**sizes, decoder_start_token_id=0)
    shape.architectures = ["T5ForConditionalGeneration"]
    config = load_config({"zero_optimization": {"stage": 2}})

    def found() -> Estimate:
        question = Question(2, 4, 64, checkpointing)
        return estimate(build(shape, torch.float32), config, question)

    known = found()
    with mock.patch.object(calls, "key_of", lambda *_: None):
        executed = found()
    assert (known.parts, known.traffic) == (executed.parts, executed.traffic)


@pytest.fixture
def plan(tmp_path, capsys) -> Callable[..., str]:
    """Call `zero plan` for a model's configuration. Returns what it prints."""

    def call(shape: transformers.PretrainedConfig, *options: str) -> str:
        shape.save_pretrained(tmp_path / "model")
        out = str(tmp_path / "planned.json")
        main(["plan", str(tmp_path / "model"), "--seq", "16", "--out", out, *options])
        return capsys.readouterr().out

    return call


def test_a_plan_fits_and_is_the_fastest(plan, ask, tmp_path, capsys):
    def rates(text: str) -> list[float]:
        found = re.findall(r"([\d,]+)\s+tokens/s", text)
        return [float(rate.replace(",", "")) for rate in found]

    shape = llama(**LARGE, num_hidden_layers=1)
    limits = ["--device-memory", "25M", "--host-memory", "87M"]
    text = plan(shape, *limits)
    keys = json.loads((tmp_path / "planned.json").read_text())
    section = keys.pop("zero_optimization")
    saves = section.get("stage3_gather_16bit_weights_on_model_save", False)
    assert saves == (section["stage"] == 3)
    again = ask(shape, section, "--seq", "16", "--json", *limits, **keys)
    assert again["fits"]
    assert rates(text) == [pytest.approx(again["tokens_per_second"], rel=0.01)]
    assert "Nothing else needs less memory." in text
    assert f"zero_optimization.stage = {section['stage']}" in text
    options = "--per_device_train_batch_size 1 --gradient_accumulation_steps 1"
    assert options in " ".join(text.split())
    found = json.loads(plan(shape, "--device-memory", "1G", "--json"))
    assert found["configuration"]["zero_optimization"] == {"stage": 0}
    assert found["configuration"] == json.loads((tmp_path / "planned.json").read_text())
    first, second, *_ = rates(" ".join(found["found"]))
    assert first >= second
    too_little = ["--device-memory", "0.1M", "--host-memory", "0.1M"]
    assert "does not fit with" in refusal(capsys, plan, shape, *too_little)
    assert "--device-memory" in refusal(capsys, plan, shape)


def test_a_plan_runs_a_batch_in_slices_where_nothing_else_fits(plan, tmp_path):
    shape = llama(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
    text = plan(shape, "--batch", "16", "--seq", "1024", "--device-memory", "1G")
    keys = json.loads((tmp_path / "planned.json").read_text())
    assert keys["activation_checkpointing"] == {"batch_slices": "Auto", "cpu_checkpointing": True}
    assert keys["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert keys["train_micro_batch_size_per_gpu"] == 16 and "tokens/s" in text
    assert "--gradient_checkpointing" not in text


def test_states_without_masters_are_estimated_on_the_device(ask):
    lean = {"enabled": True, "bf16_master_weights_and_grads": True}
    found = ask(llama(), {"stage": 3}, "--json", bf16=lean)["bytes"]["device"]
    assert "masters" not in found and found["optimizer state"] > 0


def test_large_codes_on_the_host_take_no_real_memory():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, size = resident(), 1 << 28
    codes = _on_host(torch.empty(size, dtype=torch.uint8, device="meta"))
    assert codes.shape == (size,) and not codes[:: size // 16].any()
    assert resident() - before < size // 4
