"""Workflows with a Trainer beyond one training. An ordinary transformers script, which does not
mention zero.

`python workflows.py FOLDER` runs them one after another. Rank 0 writes the results to
FOLDER/report.json.

Each workflow is a function of its own folder, which has the same path on all ranks. It first does
what needs no sharding, such as the reference in plain torch on the whole batch. It returns a
function that does the rest. That is called when all references are done: once training arguments
exist, transformers builds every model sharded."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
Sharded = Callable[[], Any]


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


def trained(trainer: Any) -> list[float]:
    """Return the losses of the steps, and the loss after them."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


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


def held(params: Any) -> float:
    """Return the fraction of the parameters' elements that is in this rank's memory."""
    params = list(params)
    return sum(param.ds_tensor.numel() for param in params) / sum(param.numel() for param in params)


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: param.detach().clone()
        for name, param in model.named_parameters(remove_duplicate=False)
    }


def private(folder: Path) -> Path:
    """Return a folder of this rank alone, so that no rank waits for another's files."""
    return folder / f"rank{os.environ['RANK']}"


# -- the workflows


def evaluation_only(folder: Path) -> Sharded:
    model, batch = make_model("t5"), whole_batch("t5")
    with torch.no_grad():
        expected = model(**batch).loss.item()
    tokens = model.generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=6
    )

    def sharded() -> Any:
        trainer = trainer_for("t5", make_model("t5"), arguments(folder, predict_with_generate=True))
        evaluated = trainer.evaluate(max_new_tokens=6)["eval_loss"]
        predicted = trainer.predict(trainer.eval_dataset, max_new_tokens=6)
        same = torch.equal(torch.from_numpy(predicted.predictions)[:, : tokens.shape[1]], tokens)
        return {
            "expected": expected, "evaluated": evaluated,
            "predicted": predicted.metrics["test_loss"],
            "same_tokens": same, "held": held(trainer.model.parameters()),
            "optimizer": getattr(trainer.model_wrapped, "optimizer", None) is not None,
        }  # fmt: skip

    return sharded


def batch_size_is_found(folder: Path) -> Sharded:
    """At stage 2: transformers itself refuses `auto_find_batch_size` at stage 3."""

    def too_large(module: torch.nn.Module, args: tuple) -> None:
        if args[0].shape[0] > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate too much")

    def sharded() -> Any:
        model = make_model("llama")
        model.model.layers[1].register_forward_pre_hook(too_large)
        config = ZERO3 | {"zero_optimization": {"stage": 2}}
        args = arguments(
            folder, deepspeed=config, auto_find_batch_size=True, per_device_eval_batch_size=2
        )
        trainer = trainer_for("llama", model, args)
        losses = trained(trainer)
        return {"batch_size": trainer.state.train_batch_size, "losses": losses}

    return sharded


def sharded_checkpoint(folder: Path) -> Sharded:
    path = private(folder)
    plain = make_model("t5")
    plain.save_pretrained(path, max_shard_size="20KB")
    values = values_of(plain)

    def sharded() -> Any:
        args = arguments(folder)  # must stay alive while the model is loaded
        model = T5ForConditionalGeneration.from_pretrained(path)
        report = {"differing": differing(model, values), "held": held(model.parameters())}
        return report | {
            "files": len(list(path.glob("*.safetensors"))),
            "zero3": args.hf_deepspeed_config.is_zero3(),
        }

    return sharded


def random_numbers(folder: Path) -> Sharded:
    """The random state after a ViT, whose constructor draws, was loaded."""
    path = private(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    ViTModel(ViTConfig(num_hidden_layers=1, image_size=16, **sizes)).save_pretrained(path)

    def number() -> float:
        set_seed(2)
        ViTModel.from_pretrained(path)
        return torch.rand(()).item()

    plain = number()

    def sharded() -> Any:
        args = arguments(folder)
        assert args.hf_deepspeed_config.is_zero3()
        return {"plain": plain, "loaded": number()}

    return sharded


def saved_names(kind: type[PreTrainedModel], config: PretrainedConfig, folder: Path) -> Sharded:
    """A model whose weights have other names in its files than in its modules."""
    path = private(folder)
    kind(config).save_pretrained(path)
    kind.from_pretrained(path).save_pretrained(path / "plain")
    expected = load_file(path / "plain" / "model.safetensors")

    def sharded() -> Any:
        args = arguments(folder, learning_rate=0.0, max_steps=1)
        trainer = trainer_for("llama", kind.from_pretrained(path), args)
        trainer.train()
        trainer.save_model(str(folder))
        if not trainer.is_world_process_zero():
            return None
        found = load_file(folder / "model.safetensors")
        return {
            "missing": sorted(expected.keys() - found.keys()),
            "others": sorted(found.keys() - expected.keys()),
            "differing": [
                name for name in expected.keys() & found.keys()
                if not torch.equal(expected[name], found[name])
            ],
        }  # fmt: skip

    return sharded


def built(kind: type[PreTrainedModel], config: PretrainedConfig, folder: Path) -> Sharded:
    """A model of models that its class builds: those inside are sharded, and then drawn."""

    def sharded() -> Any:
        args = arguments(folder)  # must stay alive while the model is built
        assert args.hf_deepspeed_config.is_zero3()
        params = [each for each in kind(config).parameters() if hasattr(each, "ds_tensor")]
        return [full(param).std().item() for param in params if param.dim() > 1]

    return sharded


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
WORKFLOWS: dict[str, Callable[[Path], Sharded]] = {
    "evaluation_only": evaluation_only,
    "batch_size_is_found": batch_size_is_found,
    "sharded_checkpoint": sharded_checkpoint,
    "random_numbers": random_numbers,
    "built_clip": partial(built, CLIPModel, CLIPConfig(text_config=TEXT, vision_config=IMAGE)),
    "built_llava": partial(built, *NAMED["llava"]),
    # Earlier releases name the weights of these models otherwise.
    **{
        f"saved_names_{name}": partial(saved_names, *model)
        for name, model in NAMED.items()
        if Version(transformers.__version__) >= Version("5.23")
    },
}


def main() -> None:
    folder = Path(sys.argv[1])
    prepared = {name: prepare(folder / name) for name, prepare in WORKFLOWS.items()}
    report = {name: sharded() for name, sharded in prepared.items()}
    if os.environ["RANK"] == "0":
        (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
