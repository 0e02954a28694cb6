"""Workflows with a Trainer beyond one training. An ordinary transformers script, which does not
mention zero.

`python workflows.py FOLDER` runs them one after another, and fails where one differs from plain
torch.

Each workflow is a generator with a folder of its own, which has the same path on all ranks. It
first does what needs no sharding, such as the reference in plain torch on the whole batch. What
comes after its `yield` runs when all references are done: once training arguments exist,
transformers builds every model sharded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jobs import Tokens, collate, make_model
from packaging.version import Version
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
    set_seed,
)

LR, STEPS, SAMPLES, RANKS = 1e-2, 3, 8, 2
ZERO3 = {
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}

Batch = dict[str, torch.Tensor]


def data(name: str) -> Tokens:
    return Tokens(SAMPLES, seq2seq=name == "t5")


def whole_batch(name: str) -> Batch:
    return collate([data(name)[index] for index in range(SAMPLES)])


def arguments(folder: Path, **others: Any) -> Seq2SeqTrainingArguments:
    """Make training arguments. Every step takes all samples, so their order makes no difference."""
    settings = {
        "output_dir": str(folder), "deepspeed": ZERO3, "max_steps": STEPS, "logging_steps": 1,
        "learning_rate": LR,
        "lr_scheduler_type": "constant", "per_device_train_batch_size": SAMPLES // RANKS,
        "save_strategy": "no",
        "per_device_eval_batch_size": SAMPLES // RANKS, "report_to": [], "disable_tqdm": True,
        "dataloader_pin_memory": False, "average_tokens_across_devices": False,
    }  # fmt: skip
    return Seq2SeqTrainingArguments(**settings | others)


def trainer_for(
    name: str, model: torch.nn.Module | None, args: Seq2SeqTrainingArguments, **others: Any
) -> Any:
    return Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=data(name),
        eval_dataset=data(name),
        data_collator=collate,
        **others,
    )


def full(param: torch.nn.Parameter) -> torch.Tensor:
    from deepspeed.zero import GatheredParameters

    with GatheredParameters([param]):
        return param.detach().clone()


def differing(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the parameters whose values are not exactly the expected ones."""
    values = {name: full(param) for name, param in model.named_parameters(remove_duplicate=False)}
    missing = sorted(expected.keys() ^ values.keys())
    return missing + [
        name
        for name in values
        if name in expected and not torch.equal(values[name], expected[name])
    ]


def assert_halved(model: torch.nn.Module) -> None:
    """This rank has half of the elements in its memory."""
    held = sum(param.ds_tensor.numel() for param in model.parameters())
    whole = sum(param.numel() for param in model.parameters())
    assert held / whole == pytest.approx(0.5, abs=0.01)


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-4)


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: param.detach().clone()
        for name, param in model.named_parameters(remove_duplicate=False)
    }


def private(folder: Path) -> Path:
    """Return a folder of this rank alone, so that no rank waits for another's files."""
    return folder / f"rank{os.environ['RANK']}"


# -- the workflows


def evaluation_only(folder: Path) -> Iterator[None]:
    model, batch = make_model("t5"), whole_batch("t5")
    with torch.no_grad():
        expected = model(**batch).loss.item()
    given = {"attention_mask": batch["attention_mask"], "max_new_tokens": 6}
    tokens = model.generate(batch["input_ids"], **given)
    yield
    trainer = trainer_for("t5", make_model("t5"), arguments(folder, predict_with_generate=True))
    evaluated = trainer.evaluate(max_new_tokens=6)["eval_loss"]
    predicted = trainer.predict(trainer.eval_dataset, max_new_tokens=6)
    assert [evaluated, predicted.metrics["test_loss"]] == close([expected] * 2)
    assert torch.equal(torch.from_numpy(predicted.predictions)[:, : tokens.shape[1]], tokens)
    assert getattr(trainer.model_wrapped, "optimizer", None) is None
    assert_halved(trainer.model)


def batch_size_is_found(folder: Path) -> Iterator[None]:
    """At stage 2: transformers itself refuses `auto_find_batch_size` at stage 3."""

    def too_large(module: torch.nn.Module, args: tuple) -> None:
        if args[0].shape[0] > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate too much")

    yield
    model = make_model("llama")
    model.model.layers[1].register_forward_pre_hook(too_large)
    config = ZERO3 | {"zero_optimization": {"stage": 2}}
    args = arguments(folder, deepspeed=config, auto_find_batch_size=True)
    trainer = trainer_for("llama", model, args)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.state.train_batch_size == 2 and losses[0] > losses[-1]


def sharded_checkpoint(folder: Path) -> Iterator[None]:
    path, plain = private(folder), make_model("t5")
    plain.save_pretrained(path, max_shard_size="20KB")
    values = values_of(plain)
    yield
    args = arguments(folder)  # must stay alive while the model is loaded
    model = T5ForConditionalGeneration.from_pretrained(path)
    assert args.hf_deepspeed_config.is_zero3() and len(list(path.glob("*.safetensors"))) > 5
    assert differing(model, values) == []
    assert_halved(model)


def random_numbers(folder: Path) -> Iterator[None]:
    """The random state after a ViT, whose constructor draws, was loaded."""
    path = private(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    ViTModel(ViTConfig(num_hidden_layers=1, image_size=16, **sizes)).save_pretrained(path)

    def number() -> float:
        set_seed(2)
        ViTModel.from_pretrained(path)
        return torch.rand(()).item()

    plain = number()
    yield
    args = arguments(folder)
    assert args.hf_deepspeed_config.is_zero3() and number() == plain


def saved_names(
    kind: type[PreTrainedModel], config: PretrainedConfig, folder: Path
) -> Iterator[None]:
    """A model whose weights have other names in its files than in its modules."""
    path = private(folder)
    kind(config).save_pretrained(path)
    kind.from_pretrained(path).save_pretrained(path / "plain")
    expected = load_file(path / "plain" / "model.safetensors")
    yield
    args = arguments(folder, learning_rate=0.0, max_steps=1)
    trainer = trainer_for("llama", kind.from_pretrained(path), args)
    trainer.train()
    trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        found = load_file(folder / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def built(kind: type[PreTrainedModel], config: PretrainedConfig, folder: Path) -> Iterator[None]:
    """A model of models that its class builds: those inside are sharded, and then drawn."""
    yield
    args = arguments(folder)  # must stay alive while the model is built
    assert args.hf_deepspeed_config.is_zero3()
    params = [each for each in kind(config).parameters() if hasattr(each, "ds_tensor")]
    matrices = [param for param in params if param.dim() > 1]
    assert len(matrices) > 10 and min(full(each).std().item() for each in matrices) > 1e-3


SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
NAMED = {
    "bert": (BertForMaskedLM, BertConfig(vocab_size=64, **SMALL)),
    "llava": (
        LlavaForConditionalGeneration,
        LlavaConfig(
            vision_config=CLIPVisionConfig(image_size=16, patch_size=8, **SMALL),
            text_config=LlamaConfig(vocab_size=64, **SMALL),
            image_token_index=63,
        ),
    ),
}


TEXT = SMALL | {"vocab_size": 64, "eos_token_id": 2}
IMAGE = SMALL | {"image_size": 16, "patch_size": 8}
WORKFLOWS: dict[str, Callable[[Path], Iterator[None]]] = {
    "evaluation_only": evaluation_only,
    "batch_size_is_found": batch_size_is_found,
    "sharded_checkpoint": sharded_checkpoint,
    "random_numbers": random_numbers,
    "built_clip": partial(built, CLIPModel, CLIPConfig(text_config=TEXT, vision_config=IMAGE)),
    "built_llava": partial(built, *NAMED["llava"]),
}
# Earlier releases name the weights of these models otherwise.
if Version(transformers.__version__) >= Version("5.23"):
    WORKFLOWS |= {f"saved_{name}": partial(saved_names, *model) for name, model in NAMED.items()}


def main() -> None:
    folder = Path(sys.argv[1])
    workflows = [workflow(folder / name) for name, workflow in WORKFLOWS.items()]
    for _ in range(2):
        for workflow in workflows:
            next(workflow, None)


if __name__ == "__main__":
    main()
