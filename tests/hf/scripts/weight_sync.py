"""TRL's GRPO or RLOO with a stand-in for vLLM, which keeps what it is sent. An ordinary script,
which does not mention zero but to measure it.

`python weight_sync.py FOLDER TRAINER MODE ADAPTER` fails unless each synchronization of the weights
sends those of a model that PEFT has merged in one process, gathers each element once, and never
more than a block at a time."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
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
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
STAGE_3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
DEEPSPEED = {"zero_optimization": STAGE_3, **dict.fromkeys(SIZES, "auto")}

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


class Checked:
    """Stands for a trainer's `VLLMGeneration`, and checks each of its synchronizations."""

    def __init__(self, trainer: Any, plain: torch.nn.Module):
        self._trainer, self._generation, self._plain = trainer, trainer.vllm_generation, plain
        self.syncs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generation, name)

    def sync_weights(self) -> None:
        engine = self._trainer.model_wrapped
        expected = self._expected(engine)
        RECEIVED.clear()
        residency, before = engine.residency, self._elements(engine)
        residency.peak = live = residency.live
        self._generation.sync_weights()
        sizes: Counter[Any] = Counter()
        for group in engine.groups:
            sizes[tuple(group.modules)] += group.layout.numel
        assert residency.peak - live <= max(sizes.values()) <= sizes.total() / 2
        # Padding apart, everything comes once.
        assert self._elements(engine) - before <= 1.01 * sizes.total()
        assert residency.live == live
        self.syncs += 1
        if not self._trainer.accelerator.is_main_process:
            return
        assert RECEIVED.keys() == expected.keys() and len(RECEIVED) > 20
        assert all(torch.equal(value, expected[name]) for name, value in RECEIVED.items())
        if METADATA:
            assert [tuple(entry) for entry in METADATA[-1]] == [
                (name, str(value.dtype).removeprefix("torch."), list(value.shape))
                for name, value in RECEIVED.items()
            ]

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
    kinds = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}
    config, trainer_class = kinds[kind]
    plain = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if ADAPTERS[adapter] is not None:
        plain = get_peft_model(plain, copy.deepcopy(ADAPTERS[adapter]))
    if kind == "grpo":
        config = partial(config, vllm_importance_sampling_correction=False)
    args = config(
        output_dir=str(folder / f"{kind}_{mode}_{adapter}"), deepspeed=DEEPSPEED, use_vllm=True,
        vllm_mode=mode, max_steps=3, num_generations=2, max_completion_length=8,
        per_device_train_batch_size=2, learning_rate=1e-2, beta=0.1, bf16=False, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = trainer_class(
        model=str(folder / "model"),
        reward_funcs=vowels,
        args=args,
        train_dataset=datasets.load_dataset(str(folder / "prompt"), split="train"),
        peft_config=ADAPTERS[adapter],
    )
    checked = trainer.vllm_generation = Checked(trainer, plain)
    trainer.train()
    assert checked.syncs == 3
    if trainer.accelerator.is_main_process:
        assert bool(METADATA) == (mode == "server")


if __name__ == "__main__":
    main()
