"""PEFT's adapters against plain torch: losses and weights at all stages, and what is saved.

They are equal bit for bit on any CPU: the reference runs the micro-batches of all ranks in turn, so
that shapes and the order of sums are the same (`train_in_slices`)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import zero
from tests.dist.training import (
    Curve,
    assert_same_training,
    assert_same_weights,
    ds_config,
    relative,
    start,
    together,
    train_in_slices,
    train_plain,
    train_zero,
)
from tests.hunt.saves import files
from tests.parity.models import ROWS, batches, build
from tests.parity.test_fp32 import SMALL
from tests.parity.test_quantized import saved_base, with_adapter
from tests.parity.test_tensor_parallel import build as tensor_parallel_model
from tests.processes import run_on
from tests.tolerance import rounding
from zero.checkpoint.files import bytes_of
from zero.checkpoint.models import consolidate
from zero.core.quantized_weights import reachable
from zero.errors import UsageError

IN_PEFT = "ignore:.*gradient_checkpointing:FutureWarning"
STEPS = 3
TASKS = {"t5": "SEQ_2_SEQ_LM", "llama": "CAUSAL_LM"}
LINEAR = {"t5": ["q", "v", "wi", "wo"], "llama": ["q_proj", "v_proj", "down_proj"]}


def lora(name: str, **options: Any) -> peft.LoraConfig:
    options = {"r": 4, "target_modules": LINEAR[name], "init_lora_weights": False} | options
    return peft.LoraConfig(task_type=TASKS[name], **options)


def ia3(name: str) -> peft.IA3Config:
    return peft.IA3Config(
        task_type=TASKS[name],
        target_modules=LINEAR[name],
        feedforward_modules=[LINEAR[name][-1]],
        init_ia3_weights=False,
    )


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


# What is done to the base model, and the adapter's configuration.
Case = tuple[Callable[[Any], None] | None, Callable[[str], peft.PeftConfig]]
CASES: dict[str, Case] = {
    "LoRA": (None, lora),
    "rsLoRA": (None, lambda name: lora(name, use_rslora=True)),
    "DoRA": (None, lambda name: lora(name, use_dora=True)),
    "bias": (None, lambda name: lora(name, bias="lora_only")),
    "IA3": (None, ia3),
    "prompt": (
        None,
        lambda name: peft.PromptTuningConfig(task_type=TASKS[name], num_virtual_tokens=5),
    ),
    "prefix": (
        None,
        lambda name: peft.PrefixTuningConfig(task_type=TASKS[name], num_virtual_tokens=5),
    ),
    "head": (None, lambda name: lora(name, modules_to_save=["lm_head"])),
    "tokens": (None, lambda name: lora(name, trainable_token_indices=[3, 5, 8])),
    "resized": (
        resized,
        lambda name: lora(
            name, modules_to_save=["lm_head", "shared" if name == "t5" else "embed_tokens"]
        ),
    ),
    "resized, tokens": (resized, lambda name: lora(name, trainable_token_indices=[97, 98, 102])),
    "two": (None, lora),
    "bf16": (bf16, lora),
    "reentrant": (checkpointed(True), lora),
    "non-reentrant": (checkpointed(False), lora),
    "reentrant DoRA": (checkpointed(True), lambda name: lora(name, use_dora=True)),
}
OTHERS: dict[str, Case] = {
    "NF4": (quantized, lora),
    "NF4, cut": (lambda model: quantized(model, ["q_proj"]), lora),
    "all linear": (None, lambda name: lora(name, target_modules="all-linear")),
    "all biases": (None, lambda name: lora(name, use_rslora=True, bias="all")),
    "two with a head": (None, lambda name: lora(name, target_modules=["q_proj", "lm_head"])),
    "head and embeddings": (
        None,
        lambda name: lora(name, modules_to_save=["lm_head", "embed_tokens"]),
    ),
}


def adapted(name: str, case: str, base: Any = None) -> Any:
    change, config = (CASES | OTHERS)[case]
    base = base or build(name)
    if change is not None:
        change(base)
    torch.manual_seed(4)
    model = peft.get_peft_model(base, config(name))
    if case.startswith("two"):
        model.add_adapter("second", config(name))
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


def reference(rank: int, world_size: int, name: str, case: str) -> Curve:
    return train_in_slices(adapted(name, case), batches(name, STEPS), 2)


NOTHING_PERSISTS = SMALL | {"stage3_param_persistence_threshold": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": SMALL,
    "offload": {
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
    },
}


def sharded(rank: int, world_size: int, name: str, case: str, settings: str) -> list[Curve]:
    """Train with one of `SETTINGS`, and where nothing persists."""
    return [
        train_zero(start(adapted(name, case), ds_config(**section))[0], batches(name, STEPS))
        for section in (SETTINGS[settings], NOTHING_PERSISTS)
    ]


# Each kind with one of the models and one of the settings, in turn. `tests/hunt/saves.py` saves
# most of them.
@pytest.mark.filterwarnings(IN_PEFT)
@pytest.mark.parametrize(
    ("name", "case", "settings"),
    [
        (list(TASKS)[number % len(TASKS)], case, list(SETTINGS)[number % len(SETTINGS)])
        for number, case in enumerate(CASES)
    ],
)
def test_adapters_are_bit_for_bit(name: str, case: str, settings: str) -> None:
    (expected,) = run_on(1, reference, name, case)
    for curves in zip(*run_on(2, sharded, name, case, settings), strict=True):
        assert_same_training(together(curves), expected)


# -- resuming and merging


def first_half(
    rank: int, world_size: int, name: str, case: str, folder: Path
) -> tuple[Curve, list[str]]:
    """The curve, and the names of frozen parameters."""
    model = adapted(name, case)
    engine, _ = start(model, ds_config(**NOTHING_PERSISTS))
    curve = train_zero(engine, batches(name, STEPS)[: STEPS // 2])
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    return curve, [key for key, param in model.named_parameters() if not param.requires_grad]


def second_half(rank: int, world_size: int, name: str, case: str, folder: Path) -> list[Curve]:
    """The curve from the checkpoint on, and one without steps, which has the loaded weights."""
    model = adapted(name, case)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.fill_(0.5)
    engine, _ = start(model, ds_config(**NOTHING_PERSISTS))
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    loaded = train_zero(engine, [])
    return [train_zero(engine, batches(name, STEPS)[STEPS // 2 :]), loaded]


def whole_run(rank: int, world_size: int, name: str, case: str) -> Curve:
    return train_plain(adapted(name, case), batches(name, STEPS))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("llama", "LoRA"),
        ("t5", "resized"),
        ("llama", "two"),
        ("t5", "prefix"),
        ("t5", "NF4"),
    ],
)
def test_two_processes_are_resumed_as_three_without_the_base(
    name: str, case: str, tmp_path: Path
) -> None:
    curves, ((*frozen,), _) = zip(*run_on(2, first_half, name, case, tmp_path), strict=True)
    first = together(curves)
    manifest = json.loads(next(tmp_path.rglob("checkpoint.json")).read_text())
    stored = {*manifest["parameters"], *manifest["plain"]}
    assert frozen and not [name for name in stored if name.startswith(tuple(frozen))]
    second, loaded = (
        together(curves)
        for curves in zip(*run_on(3, second_half, name, case, tmp_path), strict=True)
    )
    assert_same_weights(loaded.weights, first.weights)
    (expected,) = run_on(1, whole_run, name, case)
    losses = [*first.mean_losses(), *second.mean_losses()]
    assert relative(losses, expected.mean_losses()) <= rounding(torch.float32, 100, STEPS)


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
