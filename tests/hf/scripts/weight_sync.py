"""TRL's GRPO or RLOO with a stand-in for vLLM, which keeps what it is sent. An ordinary script,
which does not mention zero but to measure it.

`python weight_sync.py FOLDER TRAINER MODE ADAPTER`: rank 0 writes FOLDER/report.json. For each
synchronization of the weights: which of them differ from those of a model that PEFT has merged in
one process, how many elements were gathered, and how many were gathered at a time."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import torch
import trl.generation.vllm_generation as generation
import trl.trainer.grpo_trainer
import trl.trainer.rloo_trainer
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import zero
from benchmarks.compatibility.data import vowels

ADAPTERS: dict[str, Any] = {
    "none": None,
    "LoRA": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    "DoRA": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, use_dora=True),
    "head": LoraConfig(
        r=4, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["lm_head"]
    ),
    "IA3": IA3Config(
        target_modules=["v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    ),
}
DEEPSPEED = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}

RECEIVED: dict[str, torch.Tensor] = {}
METADATA: list[list[Any]] = []


def receive(weights: Any) -> None:
    for name, value in weights:
        assert name not in RECEIVED, f"{name} comes twice"
        RECEIVED[name] = value.clone()


class Client:
    """In place of `VLLMClient`: rank 0 has one."""

    def __init__(self, **_: Any):
        pass

    def init_communicator(self, **_: Any) -> None:
        pass

    def update_named_params(self, metadata: list[Any], named_params: Iterator) -> None:
        METADATA.append(metadata)
        receive(named_params)

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
        completions = [completion(ids, turn) for ids in prompts for turn in range(n)]
        logprobs = [[[-1.0] for _ in tokens] for tokens in completions]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}


class Engine:
    """In place of vLLM's `LLM`: each rank has one."""

    def __init__(self, **_: Any):
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=receive))
        worker = SimpleNamespace(model_runner=runner)
        executor = SimpleNamespace(driver_worker=worker)
        self.llm_engine = SimpleNamespace(model_executor=executor)

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, prompts: list[dict[str, Any]], **_: Any) -> list[Any]:
        outputs = []
        for turn, prompt in enumerate(prompts):
            tokens = completion(prompt["prompt_token_ids"], turn)
            logprobs = [{token: SimpleNamespace(rank=1, logprob=-1.0)} for token in tokens]
            completions = [SimpleNamespace(token_ids=tokens, logprobs=logprobs)]
            outputs.append(SimpleNamespace(**prompt, outputs=completions))
        return outputs


def completion(prompt: list[int], turn: int) -> list[int]:
    """Eight tokens that differ from turn to turn, so that there is an advantage."""
    return [(sum(prompt) + 31 * turn + 7 * place) % 300 + 3 for place in range(8)]


def stand_in() -> None:
    generation.is_vllm_available = lambda *_, **__: True
    generation.LLM, generation.VLLMClient = Engine, Client
    generation.SamplingParams = SimpleNamespace
    for module in (trl.trainer.grpo_trainer, trl.trainer.rloo_trainer):
        module.is_vllm_available = generation.is_vllm_available


class Measured:
    """Stands for a trainer's `VLLMGeneration`: measures each of its synchronizations."""

    def __init__(self, trainer: Any, plain: torch.nn.Module):
        self._trainer, self._generation, self._plain = trainer, trainer.vllm_generation, plain
        self.syncs: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generation, name)

    def sync_weights(self) -> None:
        engine = self._trainer.model_wrapped
        expected = self._expected(engine)
        RECEIVED.clear()
        gathered, residency = self._elements(engine), engine.residency
        residency.peak = residency.live
        live = residency.live
        self._generation.sync_weights()
        blocks: dict[Any, int] = {}
        for group in engine.groups:
            key = tuple(group.modules)
            blocks[key] = blocks.get(key, 0) + group.layout.numel
        self.syncs.append(
            {
                "gathered": self._elements(engine) - gathered,
                "peak": residency.peak - live,
                "left": residency.live - live,
                "block": max(blocks.values()),
                "whole": sum(blocks.values()),
                "received": len(RECEIVED),
                "expected": len(expected),
                "differing": [
                    name
                    for name, value in RECEIVED.items()
                    if not torch.equal(value, expected.get(name, value + 1))
                ],
                "metadata": [
                    [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
                    for name, value in RECEIVED.items()
                ]
                == [list(entry) for entry in METADATA[-1]]
                if METADATA
                else None,
            }
        )

    def _elements(self, engine: Any) -> int:
        counted = engine.comm.elements
        return counted["all_gather"] + counted["broadcast"]

    def _expected(self, engine: Any) -> dict[str, torch.Tensor]:
        """By TRL's names: the weights of a model on one process, merged."""
        state = {name: value.clone() for name, value in zero.stream_weights(engine)}
        self._plain.load_state_dict(state, strict=False)
        model = copy.deepcopy(self._plain)
        if not hasattr(model, "merge_adapter"):
            return dict(model.named_parameters())
        model.merge_adapter()
        return {
            name.removeprefix("base_model.model.")
            .replace(".base_layer", "")
            .replace("modules_to_save.default.", ""): value.detach()
            for name, value in model.named_parameters()
            if model.prefix not in name and "original_module" not in name
        }


def main() -> None:
    folder, kind, mode, adapter = Path(sys.argv[1]), *sys.argv[2:]
    stand_in()
    config, trainer_class = {
        "grpo": (GRPOConfig, GRPOTrainer),
        "rloo": (RLOOConfig, RLOOTrainer),
    }[kind]
    plain = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if ADAPTERS[adapter] is not None:
        plain = get_peft_model(plain, copy.deepcopy(ADAPTERS[adapter]))
    (folder / "ds.json").write_text(json.dumps(DEEPSPEED))
    args = config(
        output_dir=str(folder / f"{kind}_{mode}_{adapter}"),
        deepspeed=str(folder / "ds.json"),
        use_vllm=True,
        vllm_mode=mode,
        max_steps=3,
        num_generations=2,
        max_completion_length=8,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        beta=0.1,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        model_init_kwargs={"dtype": "float32"},
        **({"vllm_importance_sampling_correction": False} if kind == "grpo" else {}),
    )
    trainer = trainer_class(
        model=str(folder / "model"),
        reward_funcs=vowels,
        args=args,
        train_dataset=datasets.load_dataset(str(folder / "prompt"), split="train"),
        peft_config=ADAPTERS[adapter],
    )
    measured = trainer.vllm_generation = Measured(trainer, plain)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if os.environ["RANK"] == "0":
        report = {"syncs": measured.syncs, "losses": logged}
        (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
