"""Loads quantized models whole and sharded, and compares what scripts do with them.

`python quantized.py FOLDER` loads each kind once before training arguments exist (whole, as
transformers does by itself) and once after (sharded). It does the same with both, and trains both
at stage 3: nothing differs but the memory."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchao.quantization import Int8WeightOnlyConfig
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaForCausalLM,
    Qwen3MoeForCausalLM,
    TorchAoConfig,
    Trainer,
    TrainingArguments,
)

from tests.distill.models import causal
from zero.core.param_group import owning_group
from zero.core.quantized_weights import reachable, wraps_tensors
from zero.hf import quantize_experts

# As the gallery has it, but the small weights of these small models are sharded, too.
ZERO3 = json.loads((Path(__file__).parents[3] / "configs" / "zero3_qlora.json").read_text())
ZERO3["zero_optimization"]["stage3_param_persistence_threshold"] = 0
LAYERS = 3
KINDS: dict[str, dict[str, Any]] = {
    "NF4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "NF4, bf16 storage": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "int8": {"load_in_8bit": True},
    "NF4 experts": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}
SAVED = "NF4, saved"
# Checkpoints of which only the memory is measured, and their quantization.
OTHERS: dict[str, Callable[[], Any]] = {
    "int8, saved": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao, saved": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators have allocated and that are alive.

    Memory of a mapped file, such as a checkpoint, is not among them. `peak`: the most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = {_address(tensor) for tensor in _plain_tensors((args, kwargs))}
        given |= {arg._cdata for arg in args if isinstance(arg, torch.UntypedStorage)}
        result = func(*args, **(kwargs or {}))
        for tensor in _plain_tensors(result):
            if _address(tensor) not in given:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        alive = {key: storage for key, each in self.storages.items() if (storage := each())}
        self.storages = {key: self.storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())


def _plain_tensors(value: object) -> list[torch.Tensor]:
    """Without those that wrap others: their storage has a size, but no memory."""
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    leaves = (leaf for leaf in leaves if not (leaf.is_meta or wraps_tensors(leaf)))
    return [leaf for leaf in leaves if leaf.layout is torch.strided]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def make_checkpoints(folder: Path) -> None:
    sizes = {"vocab_size": 256, "intermediate_size": 512, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 64, "initializer_range": 0.02}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    causal(LlamaForCausalLM, 256, LAYERS, 0, **sizes).save_pretrained(folder / "model")
    moe = causal(Qwen3MoeForCausalLM, 256, LAYERS, 0, **sizes, **experts)
    moe.save_pretrained(folder / "experts")
    load("NF4", folder)[0].save_pretrained(folder / SAVED)
    for kind, settings in OTHERS.items():
        model = AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.float32, quantization_config=settings()
        )
        model.save_pretrained(folder / kind)


def load(kind: str, folder: Path) -> tuple[Any, dict[str, int]]:
    """The model, and the bytes that were alive at the peak of loading and at its end."""
    if kind in KINDS:
        quantization = {"quantization_config": BitsAndBytesConfig(**KINDS[kind])}
        path = folder / ("experts" if kind == "NF4 experts" else "model")
    else:
        quantization, path = {}, folder / kind
    with LiveBytes() as counter:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **quantization)
        quantize_experts(model)  # nothing is left to do at stage 3
        return model, {"peak": counter.peak, "end": counter.now()}


def digest(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Of each tensor's bytes."""
    return {
        name: hashlib.sha1(
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, tensor in tensors.items()
    }


def state(module: nn.Module) -> dict[str, str]:
    return digest(state_tensors(module))


def state_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(reachable(module.state_dict()))


def use(model: Any, folder: Path, is_saved_again: bool = True) -> dict[str, Any]:
    """What scripts do with a model that they have loaded; the results."""
    ids = torch.arange(12)[None]
    found = {
        "footprint": model.get_memory_footprint(),
        "parameters": model.num_parameters(),
        "text": str(model),
        "classes": [type(param).__name__ for _, param in quantized(model)],
        "state": state(model),
        "loss in training": model.train()(input_ids=ids, labels=ids).loss.item(),
    }
    block = copy.deepcopy(model.model.layers[0])
    found["copy"] = state(block)
    found["copy's class"] = type(block.self_attn.q_proj.weight).__name__
    found["copy is ordinary"] = all(owning_group(param) is None for param in block.parameters())
    if is_saved_again:
        model.save_pretrained(folder)
        file = folder / "model.safetensors"  # written by rank 0 alone, once there are ranks
        found["saved"] = digest(load_file(file)) if file.exists() else None
    torch.manual_seed(5)
    model.resize_token_embeddings(264, mean_resizing=False)
    found["embeddings"] = digest({"old": model.get_input_embeddings().weight[:256]})
    found["resized"] = list(model.get_input_embeddings().weight.shape)
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
        model.model.layers[0].input_layernorm.weight.data.add_(1.0)
        found["written"] = model(input_ids=ids, labels=ids).loss.item()
    found["generated"] = model.eval().generate(ids, max_new_tokens=4, do_sample=False).tolist()
    return found


def quantized(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if "_proj.weight" in name]


def adapt(model: Any) -> Any:
    """Add adapters as PEFT's documentation does it."""
    model = prepare_model_for_kbit_training(model)
    torch.manual_seed(0)
    adapters = {"target_modules": "all-linear", "init_lora_weights": "gaussian"}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **adapters))


def make_arguments(folder: Path, **sections: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder / "out"), per_device_train_batch_size=2, max_steps=3, logging_steps=1,
        report_to=[], save_strategy="no", deepspeed=ZERO3 | sections, learning_rate=1e-2, seed=1,
        disable_tqdm=True,
    )  # fmt: skip


def train(model: Any, args: TrainingArguments) -> list[list[float]]:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, 256, (16,), generator=generator) for _ in range(16)]
    data = [{"input_ids": each, "labels": each} for each in tokens]
    trainer = Trainer(model, args, train_dataset=data)
    trainer.train()
    return [
        [entry["loss"], entry["grad_norm"]]
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def assert_shared(kind: str, whole: nn.Module, memory: dict[str, int], folder: Path) -> nn.Module:
    """Load a model at stage 3. No rank ever holds more than its share and one parameter, and what
    transformers and bitsandbytes allocate beyond the weights for one of them.
    """
    model, found = load(kind, folder)
    assert all(owning_group(param) is not None for param in model.parameters()), kind
    needed = memory["peak"] - memory["end"]
    largest = max(param.nbytes for param in whole.parameters())
    share = sum(tensor.nbytes for tensor in state_tensors(whole).values()) / 2
    # Scales of fewer than 2,048 bytes are not sharded.
    assert found["end"] == pytest.approx(share, rel=0.03), kind
    assert found["peak"] <= found["end"] + needed + largest, kind
    return model


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    if rank == 0:
        make_checkpoints(folder)
    torch.distributed.barrier()
    kinds = [*KINDS, SAVED]
    whole = {kind: load(kind, folder) for kind in [*kinds, *OTHERS]}

    def used(kind: str, name: str) -> dict[str, Any]:
        # transformers 5.23 cannot save a model again that was loaded from packed weights.
        is_saved_again = kind not in (SAVED, "NF4 experts")
        found = use(load(kind, folder)[0], folder / f"{name}{rank}", is_saved_again)
        return {key: value for key, value in found.items() if rank == 0 or key != "saved"}

    used_whole = {kind: used(kind, "whole") for kind in kinds}

    losses = {}
    for kind in kinds:
        args = make_arguments(folder)
        sharded = assert_shared(kind, *whole[kind], folder)
        assert used(kind, "sharded") == used_whole[kind], kind
        losses[kind] = train(adapt(sharded), args)
        args = make_arguments(folder)  # accelerate starts again with them
        assert train(adapt(whole.pop(kind)[0]), args) == losses[kind], kind
        assert len(losses[kind]) == 3
    args = make_arguments(folder, expert_parallel={"enabled": True, "autoep_size": 2})
    divided = train(adapt(load("NF4 experts", folder)[0]), args)
    for found, values in zip(divided, losses["NF4 experts"], strict=True):
        assert found == pytest.approx(values, rel=1e-6)
    for kind, (model, memory) in whole.items():
        assert_shared(kind, model, memory, folder)


if __name__ == "__main__":
    main()
