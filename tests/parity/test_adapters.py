"""PEFT's adapters against plain torch: losses and weights at all stages, and what is saved."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import zero
from tests.dist.training import Curve, ds_config, relative, start, together, train_plain, train_zero
from tests.hunt.saves import files
from tests.parity.models import ROWS, assert_bits, batches, build
from tests.parity.test_fp32 import SMALL
from tests.parity.test_quantized import saved_base, with_adapter
from tests.parity.test_tensor_parallel import build as tensor_parallel_model
from tests.processes import run_on
from zero.checkpoint.files import bytes_of
from zero.checkpoint.models import consolidate
from zero.core.quantized_weights import reachable
from zero.errors import UsageError

IN_PEFT = "ignore:.*gradient_checkpointing:FutureWarning"
STEPS = 3
TASKS = {"t5": "SEQ_2_SEQ_LM", "llama": "CAUSAL_LM"}
LINEAR = {"t5": ["q", "v", "wi", "wo"], "llama": ["q_proj", "v_proj", "down_proj"]}


def config_of(name: str, kind: Any, options: dict[str, Any]) -> peft.PeftConfig:
    """PEFT's configuration of this kind for one of the models."""
    if kind is not peft.LoraConfig:
        if kind is peft.IA3Config:
            layers = {"target_modules": LINEAR[name], "feedforward_modules": [LINEAR[name][-1]]}
            options = layers | {"init_ia3_weights": False}
        return kind(task_type=TASKS[name], **options)
    embeddings = "shared" if name == "t5" else "embed_tokens"
    saved = [embeddings if each == "embeddings" else each for each in options.get("saved", ())]
    options = {key: value for key, value in options.items() if key != "saved"}
    given = {"r": 4, "target_modules": LINEAR[name], "init_lora_weights": False} | options
    return kind(task_type=TASKS[name], modules_to_save=saved or None, **given)


def resized(model: Any) -> None:
    model.resize_token_embeddings(103, mean_resizing=False)


def bf16(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def quantized(model: Any, layers: Sequence[str] = ("q", "v", "wi")) -> None:
    """Make linear layers those of bitsandbytes, with weights in NF4."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear) and name in layers:
                sizes = layer.in_features, layer.out_features
                packed = bitsandbytes.nn.Linear4bit(*sizes, bias=False, quant_type="nf4")
                packed.load_state_dict(layer.state_dict())
                setattr(module, name, packed.to("cpu"))
    model.is_loaded_in_4bit = True


def checkpointed(reentrant: bool) -> Callable[[Any], None]:
    def apply(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()

    return apply


# What is done to the base model, the kind of adapter, and its options.
Case = tuple[Callable[[Any], None] | None, Any, dict[str, Any]]
LORA, PROMPT = peft.LoraConfig, {"num_virtual_tokens": 5}
CASES: dict[str, Case] = {
    "LoRA": (None, LORA, {}),
    "rsLoRA": (None, LORA, {"use_rslora": True}),
    "DoRA": (None, LORA, {"use_dora": True}),
    "bias": (None, LORA, {"bias": "lora_only"}),
    "IA3": (None, peft.IA3Config, {}),
    "prompt": (None, peft.PromptTuningConfig, PROMPT),
    "prefix": (None, peft.PrefixTuningConfig, PROMPT),
    "head": (None, LORA, {"saved": ["lm_head"]}),
    "tokens": (None, LORA, {"trainable_token_indices": [3, 5, 8]}),
    "resized": (resized, LORA, {"saved": ["lm_head", "embeddings"]}),
    "resized, tokens": (resized, LORA, {"trainable_token_indices": [97, 98, 102]}),
    "two": (None, LORA, {}),
    "bf16": (bf16, LORA, {}),
    "reentrant": (checkpointed(True), LORA, {}),
    "non-reentrant": (checkpointed(False), LORA, {}),
    "reentrant DoRA": (checkpointed(True), LORA, {"use_dora": True}),
}
OTHERS: dict[str, Case] = {
    "NF4, cut": (lambda model: quantized(model, ["q_proj"]), LORA, {}),
    "all linear": (None, LORA, {"target_modules": "all-linear"}),
    "all biases": (None, LORA, {"use_rslora": True, "bias": "all"}),
    "two with a head": (None, LORA, {"target_modules": ["q_proj", "lm_head"]}),
    "head and embeddings": (None, LORA, {"saved": ["lm_head", "embeddings"]}),
}


def adapted(name: str, case: str, base: Any = None) -> Any:
    change, kind, options = (CASES | OTHERS)[case]
    base = base or build(name)
    if change is not None:
        change(base)
    torch.manual_seed(4)
    model = peft.get_peft_model(base, config_of(name, kind, options))
    if case.startswith("two"):
        model.add_adapter("second", config_of(name, kind, options))
        model.base_model.set_adapter(["default", "second"])
    return model.train()


def assert_same_adapters(found: Path, expected: Path, within: float = 0.0) -> None:
    """Their tensors and their configurations."""
    saved, wanted = files(found), files(expected)
    assert saved.keys() == wanted.keys() and wanted
    for key, value in wanted.items():
        assert torch.allclose(saved[key], value, rtol=0, atol=within), key
    for file in expected.rglob("adapter_config.json"):
        here = json.loads((found / file.relative_to(expected)).read_text())
        there = json.loads(file.read_text())
        for config in (here, there):  # in PEFT's configuration it is a set
            config["target_modules"] = sorted(config.get("target_modules") or ())
        assert here == there, file


NOTHING_PERSISTS = SMALL | {"stage3_param_persistence_threshold": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": SMALL,
    "offload": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
}


# Each kind with one of the models and one of the settings, in turn, and where nothing persists.
# `tests/hunt/saves.py` saves most of them.
@pytest.mark.filterwarnings(IN_PEFT)
@pytest.mark.parametrize(
    ("name", "case", "settings"),
    [
        (list(TASKS)[number % len(TASKS)], case, list(SETTINGS)[number % len(SETTINGS)])
        for number, case in enumerate(CASES)
    ],
)
def test_adapters_are_bit_for_bit(name: str, case: str, settings: str) -> None:
    for section in (SETTINGS[settings], NOTHING_PERSISTS):
        config = ds_config(**section)
        assert_bits(2, partial(adapted, name, case), batches(name, STEPS), config)


# -- merging into a quantized base


def randomized(model: Any) -> Any:
    """LoRA's B is zero at first."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.copy_(torch.randn(param.shape, generator=generator) / 10)
    return model


def merged(rank: int, world_size: int, base: Path, kind: str) -> None:
    ids = torch.arange(32).view(2, 16)
    reference = randomized(with_adapter(base, kind))
    reference(input_ids=ids)  # 8-bit layers move what decodes them
    reference.merge_adapter()
    expected = dict(reference.named_parameters())
    model = randomized(with_adapter(base, kind))
    section = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    engine, _ = start(model, ds_config(**section))
    with torch.no_grad():
        before = engine(input_ids=ids, labels=ids).loss
    engine.residency.peak = 0
    blocks = Counter()
    for group in engine.groups:
        ((name, _), *_) = [pair for pair in model.named_modules() if pair[1] in group.modules]
        blocks[re.sub(r"(layers\.\d+).*", r"\1", name)] += group.layout.numel
    with zero.GatheredWhenRead(model):
        model.merge_adapter()
        assert engine.residency.live == 0
        found = {key: with_decoders(param) for key, param in model.named_parameters()}
        model.unmerge_adapter()
    assert found.keys() == expected.keys()
    for key, param in expected.items():
        assert found[key] == with_decoders(param), key
    assert engine.residency.live == 0
    assert engine.residency.peak <= max(blocks.values()) < sum(blocks.values()) / 2
    with torch.no_grad():
        assert torch.equal(engine(input_ids=ids, labels=ids).loss, before), "it is as it was"


def with_decoders(param: Any) -> list[bytes]:
    """The weight's bytes, and those of what decodes it if it is quantized by bitsandbytes."""
    weight = param.data  # it is merged into when it is read
    owners = weight, getattr(param, "quant_state", None), getattr(param, "SCB", None)
    return [bytes_of(value).tobytes() for _, value in reachable(owners)]


@pytest.mark.parametrize("kind", ["nf4 in bf16, nested", "int8"])
def test_a_quantized_base_is_merged_into_block_by_block(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run_on(2, merged, saved_base(tmp_path, kind), kind)


# -- tensor parallelism


def tp_reference(rank: int, world_size: int, cases: list[str], folder: Path) -> dict[str, Curve]:
    found = {}
    for case in cases:
        model = adapted("llama", case, tensor_parallel_model("llama"))
        found[case] = train_plain(model, batches("llama", STEPS))
        model.save_pretrained(folder / case)
    return found


def tp_trained(
    rank: int, world_size: int, cases: list[str], folder: Path, stage: int
) -> dict[str, Curve]:
    found = {}
    for case in cases:
        config = ds_config(stage=stage, stage3_param_persistence_threshold=0)
        config["train_micro_batch_size_per_gpu"] = ROWS // (world_size // 2)
        config["tensor_parallel"] = {"autotp_size": 2}
        model = adapted("llama", case, tensor_parallel_model("llama"))
        engine, _ = start(model, config)
        found[case] = train_zero(engine, batches("llama", STEPS))
        state = engine._zero3_consolidated_16bit_state_dict()
        if rank == 0:
            model.save_pretrained(folder / case, state_dict=state)
        # PEFT saves the output layer with its adapters.
        without = case != "two with a head"
        engine.save_checkpoint(folder / f"{case} checkpoint", exclude_frozen_parameters=without)
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("ranks", "stage", "cases"),
    [
        (2, 1, ["all biases", "head and embeddings", "prompt"]),
        (4, 3, ["all linear", "two with a head"]),
    ],
)
def test_tensor_parallelism(ranks: int, stage: int, cases: list[str], tmp_path: Path) -> None:
    (expected,) = run_on(1, tp_reference, cases, tmp_path / "plain")
    of_ranks = run_on(ranks, tp_trained, cases, tmp_path / "cut", stage)
    for case, plain in expected.items():
        for first, second in zip(of_ranks[::2], of_ranks[1::2], strict=True):
            assert first[case].losses == second[case].losses, case
            assert first[case].norms == second[case].norms, case
        found = together([curves[case] for curves in of_ranks[::2]])
        assert relative(found.mean_losses(), plain.mean_losses()) < 1e-6, case
        assert relative(found.norms, plain.norms) < 1e-5, case
        consolidate(tmp_path / "cut" / f"{case} checkpoint", tmp_path / "consolidated" / case)
        for kind in ("cut", "consolidated"):
            assert_same_adapters(tmp_path / kind / case, tmp_path / "plain" / case, within=1e-5)


REFUSED = {
    "tokens": "embed_tokens'",
    "NF4, cut": "base_layer.weight' is quantized",
    "DoRA": "cannot be sharded with it",
    "IA3": "cannot be sharded with it",
    "prefix": "prefix tuning",
}


def tp_refused(rank: int, world_size: int) -> None:
    for case, named in REFUSED.items():
        model = adapted("llama", case, tensor_parallel_model("llama"))
        with pytest.raises(UsageError, match=f"(?s)^tensor parallelism.*{named}"):
            start(model, ds_config() | {"tensor_parallel": {"autotp_size": 2}})


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    pytest.importorskip("bitsandbytes")
    run_on(2, tp_refused)
