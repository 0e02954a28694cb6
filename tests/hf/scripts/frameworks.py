"""Loops of accelerate, and of frameworks that the tests do not install: which names of DeepSpeed
each calls, in its order and with its configuration. This script does not mention zero.

`python frameworks.py CASE STAGE FOLDER` fails unless losses and saved weights are those of plain
torch. Each case trains three steps on the same eight rows, of which each of two ranks has four,
with AdamW and clipping."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from jobs import Tokens, collate, make_model
from safetensors.torch import load_file, save_model
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid, mse_loss
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, get_scheduler
from transformers.integrations import HfDeepSpeedConfig

LR, STEPS, ROWS, RANKS, CLIP = 1e-2, 3, 8, 2, 1.0
RANK = int(os.environ["RANK"])
MINE = slice(RANK * ROWS // RANKS, (RANK + 1) * ROWS // RANKS)

Batch = dict[str, torch.Tensor]
Weights = dict[str, torch.Tensor]
Done = tuple[list[float], Weights]
LossOf = Callable[[nn.Module, Batch], torch.Tensor]


def batch_of(rows: slice) -> Batch:
    data = Tokens(ROWS, seq2seq=False)
    return collate([data[index] for index in range(ROWS)[rows]])


def language_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def plain(model: nn.Module, loss_of: LossOf) -> Done:
    """The losses and weights of plain torch, with the mean over the ranks' batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    halves = [batch_of(slice(half * 4, half * 4 + 4)) for half in range(RANKS)]
    losses = []
    for _ in range(STEPS):
        loss = torch.stack([loss_of(model, half) for half in halves]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def base(folder: Path) -> Path:
    """A folder with the model, of this rank."""
    path = folder / f"base{RANK}"
    model = make_model("llama")
    model.config.save_pretrained(path)
    save_model(model, str(path / "model.safetensors"), {"format": "pt"})
    return path


def train(engine: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = language_loss(engine, batch_of(MINE))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def params_to_fetch(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """As OpenRLHF and open-instruct choose what they gather."""
    missing = ZeroParamStatus.NOT_AVAILABLE
    return [each for each in params if hasattr(each, "ds_id") and each.ds_status == missing]


def rlhf_config(stage: int, **others: Any) -> dict[str, Any]:
    """What OpenRLHF and open-instruct write, in which "auto" is left to DeepSpeed."""
    automatic = (
        "sub_group_size stage3_max_live_parameters stage3_max_reuse_distance reduce_bucket_size "
        "stage3_param_persistence_threshold stage3_prefetch_bucket_size"
    )
    sharding = dict.fromkeys(automatic.split(), "auto") | {
        "stage": stage,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
    }
    return {
        "steps_per_print": 100,
        "zero_optimization": sharding,
        "bf16": {"enabled": False},
        "gradient_clipping": CLIP,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "train_micro_batch_size_per_gpu": ROWS // RANKS,
        **others,
    }


def openrlhf(stage: int, folder: Path) -> Done:
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    deepspeed.init_distributed(timeout=timedelta(minutes=60))
    config = rlhf_config(
        stage,
        train_batch_size=ROWS,
        fp16={"enabled": False},
        data_types={"grad_accum_dtype": None},
        checkpoint={"load_universal": False},
        compile={"deepcompile": False},
        tensor_parallel={"autotp_size": 1},
        optimizer={"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
    )
    kept = HfDeepSpeedConfig(config) if stage == 3 else None
    model = LlamaForCausalLM.from_pretrained(base(folder))
    named = list(model.named_parameters())
    groups = [
        {"params": [each for name, each in named if ("norm" in name) == norms], "weight_decay": 0.0}
        for norms in (False, True)
    ]
    schedule = partial(
        get_scheduler, "constant", num_warmup_steps=0, num_training_steps=STEPS,
        scheduler_specific_kwargs={},
    )  # fmt: skip
    start = partial(deepspeed.initialize, args={"local_rank": RANK}, dist_init_required=True)
    engine, *_ = start(
        model=model, optimizer=None, model_parameters=groups, lr_scheduler=schedule, config=config
    )
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    losses = train(engine, STEPS - 1)
    assert float(engine.get_global_grad_norm()) > 0

    where = folder / "checkpoints"
    engine.save_checkpoint(where, tag="step2", client_state={"samples": 16}, save_latest=True)
    losses += train(engine, 1)
    path, states = engine.load_checkpoint(
        where, "step2", load_module_strict=True, load_optimizer_states=True,
        load_lr_scheduler_states=True, load_module_only=False,
    )  # fmt: skip
    assert path is not None and states["samples"] == 16

    # While vLLM generates
    assert engine.config["zero_optimization"]["offload_optimizer"]["device"] == "none"
    kinds = OffloadStateTypeEnum
    engine.optimizer.offload_states(
        include=[kinds.optim_states, kinds.contiguous_grad_buffer, kinds.hp_params, kinds.lp_grads],
        device=OffloadDeviceEnum.cpu, pin_memory=False, non_blocking=True,
    )  # fmt: skip
    engine.empty_partition_cache()
    engine.reload_states(non_blocking=True)
    assert train(engine, 1) == losses[-1:]

    # A reference model, in an engine without an optimizer
    reference = LlamaForCausalLM.from_pretrained(base(folder))
    frozen = rlhf_config(3 if stage == 3 else 0, train_batch_size=ROWS)
    reference_engine, *_ = start(model=reference, config=frozen)
    with torch.no_grad():
        assert abs(language_loss(reference_engine, batch_of(MINE)).item() - losses[0]) < 1e-6

    # To vLLM, one by one
    sent = {}
    for name, param in engine.module.named_parameters():
        shape = param.ds_shape if stage == 3 else param.shape
        with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
            sent[name] = param.data.clone()
        assert sent[name].shape == shape
    if stage == 3:
        state = engine._consolidated_16bit_state_dict()
    else:
        state = clone_tensors_for_torch_save(engine.module.state_dict())
    if RANK == 0:
        assert set(engine.module.state_dict()) - {"lm_head.weight"} <= set(state)
        assert all(torch.equal(state[name], value) for name, value in sent.items())
        engine.module.save_pretrained(folder / "model", state_dict=state)
    assert (kept is not None) == (stage == 3)
    return losses, reloaded(folder)


def open_instruct(stage: int, folder: Path) -> Done:
    from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    torch_checkpoint_engine.TorchCheckpointEngine.load = lambda self, path, map_location=None: None
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    deepspeed.init_distributed(timeout=timedelta(minutes=5))
    config = rlhf_config(
        stage,
        gradient_accumulation_steps=1,
        data_types={"grad_accum_dtype": "fp32"},
        sequence_parallel_size=1,
        checkpoint={"load_universal": False},
    )
    kept = HfDeepSpeedConfig(config) if stage == 3 else None
    policy = LlamaForCausalLM.from_pretrained(base(folder))
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=policy, core_attn_implementation="sdpa", sequence_parallel_size=1,
        micro_batch_size=ROWS // RANKS, seq_length_is_variable=True,
    )  # fmt: skip
    policy.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0, fused=False)
    schedule = get_scheduler("constant", optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    engine, *_ = deepspeed.initialize(
        model=policy, optimizer=optimizer, config=config, lr_scheduler=schedule,
        dist_init_required=False, mpu=mpu,
    )  # fmt: skip
    engine.train()

    def learn() -> float:
        loss = language_loss(engine, batch_of(MINE))
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss)
        engine.step()
        return loss.item()

    losses = [learn() for _ in range(STEPS - 1)]
    before = engine.mpu
    engine.mpu = None
    states = {"numpy": np.random.get_state(), "python": random.getstate()}
    engine.save_checkpoint(folder / "states", client_state={"rng_states": states, "rank": RANK})
    losses.append(learn())
    path, found = engine.load_checkpoint(folder / "states", load_module_only=False)
    engine.mpu = before
    assert path is not None and found["rng_states"]["python"] == random.getstate()
    np.random.set_state(found["rng_states"]["numpy"])
    assert learn() == losses[-1]

    # The reference follows the policy.
    reference = LlamaForCausalLM.from_pretrained(base(folder))
    frozen = rlhf_config(3 if stage == 3 else 0, gradient_accumulation_steps=1)
    reference_engine, *_ = deepspeed.initialize(model=reference, config=frozen)
    for old, new in zip(reference_engine.parameters(), engine.parameters(), strict=True):
        if stage == 3:
            with deepspeed.zero.GatheredParameters([new, old], modifier_rank=0):
                if deepspeed.comm.get_rank() == 0:
                    old.data.mul_(0.0).add_(new.data, alpha=1.0)
        else:
            old.data.mul_(0.0).add_(new.data, alpha=1.0)
    state = {}
    for name, param in engine.module.named_parameters():
        fetched = params_to_fetch([param])
        with deepspeed.zero.GatheredParameters(fetched, enabled=len(fetched) > 0):
            state[name] = param.data.cpu().clone()
    with torch.no_grad():
        difference = language_loss(engine, batch_of(MINE)) - language_loss(
            reference_engine, batch_of(MINE)
        )
    assert abs(difference.item()) < 1e-6
    if RANK == 0:
        engine.module.save_pretrained(folder / "model", state_dict=state)
    assert (kept is not None) == (stage == 3)
    return losses, reloaded(folder)


class Sequential(Trainer):
    """Rank 0 has the first rows of each step. `loss_of` is the framework's loss."""

    loss_of: LossOf = staticmethod(language_loss)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
        return self.loss_of(model, inputs)


def config_of(stage: int) -> dict[str, Any]:
    automatic = (
        "gradient_clipping train_batch_size train_micro_batch_size_per_gpu "
        "gradient_accumulation_steps"
    )
    # axolotl's is the old name of "stage3_gather_16bit_weights_on_model_save"
    section = {"stage": stage, "gather_16bit_weights_on_model_save": True}
    return dict.fromkeys(automatic.split(), "auto") | {"zero_optimization": section}


def arguments(folder: Path, stage: int) -> TrainingArguments:
    return TrainingArguments(
        str(folder / "out"), max_steps=STEPS, logging_steps=1, learning_rate=LR, save_strategy="no",
        lr_scheduler_type="constant", per_device_train_batch_size=ROWS // RANKS, report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False, average_tokens_across_devices=False,
        remove_unused_columns=False, deepspeed=config_of(stage),
    )  # fmt: skip


def trained(trainer: Trainer, folder: Path) -> Done:
    trainer.train()
    trainer.save_model(str(folder / "model"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, reloaded(folder)


def ms_swift(stage: int, folder: Path) -> Done:
    """Its templates' hooks run last, its rollouts move shards away, its teacher has an engine."""
    settings = arguments(folder, stage)
    model = LlamaForCausalLM.from_pretrained(base(folder))
    with deepspeed.zero.GatheredParameters(model.model.norm.weight):
        assert model.model.norm.weight.eq(1).all()
    calls: list[int] = []

    def encode(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        calls.append(len(kwargs["input_ids"]))
        return args, kwargs

    handle = model.register_forward_pre_hook(encode, with_kwargs=True)
    original = deepspeed.initialize

    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        model._forward_pre_hooks.move_to_end(handle.id)
        return made

    deepspeed.initialize = initialize
    trainer = Sequential(model, settings, train_dataset=Tokens(ROWS, False), data_collator=collate)
    losses, saved = trained(trainer, folder)
    deepspeed.initialize = original
    assert calls == [ROWS // RANKS] * STEPS
    for param in model.parameters():
        if hasattr(param, "ds_tensor"):
            param.ds_tensor.data = param.ds_tensor.data.to("cpu", non_blocking=True)
    teacher, *_ = deepspeed.initialize(
        args=None, model=LlamaForCausalLM.from_pretrained(base(folder)),
        config=trainer.accelerator.state.deepspeed_plugin.deepspeed_config,
    )  # fmt: skip
    teacher.eval()
    with torch.no_grad():
        mine = torch.stack([language_loss(each, batch_of(MINE)) for each in (teacher, model)])
    assert mine[1] < mine[0]
    return losses, saved


class ValueHead(nn.Module):
    """A reward model as LLaMA-Factory saves it."""

    def __init__(self, pretrained: LlamaForCausalLM):
        super().__init__()
        self.pretrained_model, self.config = pretrained, pretrained.config
        self.v_head = nn.ModuleDict({"summary": nn.Linear(32, 1)})
        with torch.no_grad():
            self.v_head["summary"].weight.copy_(torch.linspace(-1, 1, 32))
            self.v_head["summary"].bias.zero_()

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        output = self.pretrained_model(**batch, output_hidden_states=True, use_cache=False)
        return self.v_head["summary"](output.hidden_states[-1]).squeeze(-1)


def pairwise_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    values = model(input_ids=batch["input_ids"])
    chosen, rejected = values[:, -1].chunk(2)
    return -logsigmoid(chosen.float() - rejected.float()).mean()


class PairwiseTrainer(Sequential):
    loss_of = staticmethod(pairwise_loss)

    def _save(self, output_dir: str | None = None, state_dict: Weights | None = None) -> None:
        state = self.model.state_dict() if state_dict is None else state_dict
        once = {id(value): name for name, value in sorted(state.items(), reverse=True)}
        super()._save(output_dir, {name: state[name] for name in once.values()})


def llama_factory(stage: int, folder: Path) -> Done:
    """The reward model; the size of the vocabulary; PPO's exchange of heads."""
    settings = arguments(folder, stage)
    pretrained = LlamaForCausalLM.from_pretrained(base(folder))
    embedding = pretrained.get_input_embeddings()
    with deepspeed.zero.GatheredParameters([embedding.weight]):
        assert embedding.weight.size(0) == 64
    model = ValueHead(pretrained)
    data = Tokens(ROWS, False)
    trainer = PairwiseTrainer(model, settings, train_dataset=data, data_collator=collate)
    losses, saved = trained(trainer, folder)
    head = model.v_head["summary"]
    with deepspeed.zero.GatheredParameters([head.weight, head.bias], modifier_rank=0):
        kept = head.weight.data.detach().clone()
        head.weight.data = torch.full_like(kept, 2.0)
    with deepspeed.zero.GatheredParameters([head.weight]):
        assert head.weight.eq(2).all() and not kept.eq(2).any()
    return losses, saved


class RankingLoss(nn.Module):
    """Of sentence-transformers: it keeps the model, in whose place its trainer puts the engine."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> torch.Tensor:
        first, second = (
            self.model(input_ids=ids).logits.mean(1) for ids in batch["input_ids"].split(4, dim=1)
        )
        return cross_entropy(first @ second.T, torch.arange(len(first)))


def ranking_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return RankingLoss(model)(batch)


class SentenceTrainer(Sequential):
    loss: RankingLoss

    def compute_loss(self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
        if model == self.model_wrapped and self.loss.model != model:
            self.loss.model = model
        return self.loss(inputs)


def sentence_transformers(stage: int, folder: Path) -> Done:
    settings = arguments(folder, stage)
    model = LlamaForCausalLM.from_pretrained(base(folder))
    data = Tokens(ROWS, False)
    trainer = SentenceTrainer(model, settings, train_dataset=data, data_collator=collate)
    trainer.loss = RankingLoss(model)
    return trained(trainer, folder)


def diffusers(stage: int, folder: Path) -> Done:
    """A frozen encoder, the average of `EMAModel`, states of the accelerator."""
    sizes = {"train_batch_size": ROWS, "train_micro_batch_size_per_gpu": ROWS // RANKS}
    config = config_of(stage) | {"gradient_clipping": CLIP, "gradient_accumulation_steps": 1}
    config |= sizes | {"zero_allow_untested_optimizer": True}
    plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=True)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    with plugin.zero3_init_context_manager(enable=False):  # it is sharded all the same
        encoder = LlamaForCausalLM.from_pretrained(base(folder)).requires_grad_(False)
    encoder, *_ = deepspeed.initialize(model=encoder, config=config)
    model = LlamaForCausalLM.from_pretrained(base(folder))
    with deepspeed.zero.GatheredParameters(encoder.parameters()):
        average = [each.detach().clone() for each in encoder.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    loader = torch.utils.data.DataLoader(Tokens(ROWS, False), ROWS // RANKS, collate_fn=collate)
    schedule = get_scheduler("constant", optimizer)
    unet, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    assert isinstance(unet, deepspeed.DeepSpeedEngine)
    losses = []
    for _ in range(STEPS):
        for batch in loader:
            with accelerator.accumulate(unet):
                with torch.no_grad():
                    encoder(**batch)
                loss = language_loss(unet, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            params = list(unet.parameters())
            gathered = deepspeed.zero.GatheredParameters(params, modifier_rank=None)
            with gathered if stage == 3 else nullcontext(), torch.no_grad():
                torch._foreach_sub_(average, torch._foreach_sub(average, params), alpha=1.0)
    popped: list[Any] = []
    accelerator.register_save_state_pre_hook(lambda models, weights, out: popped.extend(models))
    accelerator.save_state(str(folder / "state"))
    accelerator.load_state(str(folder / "state"))
    state = accelerator.get_state_dict(unet)
    if RANK == 0:
        accelerator.unwrap_model(unet).save_pretrained(folder / "model", state_dict=state)
        named = dict(model.named_parameters())
        assert all(
            torch.allclose(mean_, state[name]) for mean_, name in zip(average, named, strict=True)
        )
    assert len(popped) == 1
    return losses, reloaded(folder)


def lightning_fabric(stage: int, folder: Path) -> Done:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    deepspeed.utils.logging.logger.setLevel(30)
    deepspeed.init_distributed("gloo", distributed_port=29500)
    checkpointing = {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False,
    }
    files = {"block_size": 1048576, "queue_depth": 8, "single_submit": False}
    config = {
        "activation_checkpointing": checkpointing,
        "aio": files | {"overlap_events": True, "thread_count": 1},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage, "contiguous_gradients": True, "overlap_comm": True,
            "allgather_partitions": True, "reduce_scatter": True,
            "allgather_bucket_size": 200000000, "reduce_bucket_size": 200000000,
            "sub_group_size": 1000000000000,
        },
        "gradient_clipping": CLIP,
        "train_micro_batch_size_per_gpu": ROWS // RANKS,
    }  # fmt: skip
    with deepspeed.zero.Init(enabled=stage == 3, remote_device=None, config_dict_or_path=config):
        model = make_model("llama")
    values = load_file(base(folder) / "model.safetensors")

    def load(module: nn.Module, prefix: str = "") -> None:
        params = list(module.parameters(recurse=False))
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            if RANK == 0:
                module._load_from_state_dict(values, prefix, {}, True, [], [], [])
        for name, child in module.named_children():
            load(child, f"{prefix}{name}.")

    load(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    engine, optimizer, _, _ = deepspeed.initialize(
        args=SimpleNamespace(device_rank=None), config=config, model=model,
        model_parameters=filter(lambda each: each.requires_grad, model.parameters()),
        optimizer=optimizer, lr_scheduler=None, dist_init_required=False,
    )  # fmt: skip
    names = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
    partition, in_cpu, contiguous = (checkpointing[name] for name in names)
    deepspeed.checkpointing.configure(
        mpu_=None, partition_activations=partition, contiguous_checkpointing=contiguous,
        checkpoint_in_cpu=in_cpu, profile=None,
    )  # fmt: skip
    losses = train(engine, STEPS - 1)
    engine.save_checkpoint(folder / "fit", client_state={"step": 2}, tag="checkpoint")
    losses += train(engine, 1)
    _, state = engine.load_checkpoint(
        folder / "fit", tag="checkpoint", load_optimizer_states=True, load_module_strict=True,
        load_lr_scheduler_states=False,
    )  # fmt: skip
    assert state["step"] == 2 and train(engine, 1) == losses[-1:]
    engine.save_checkpoint(folder / "last", client_state={}, tag="checkpoint")
    return losses, get_fp32_state_dict_from_zero_checkpoint(str(folder / "last"), "checkpoint")


def make_teacher() -> LlamaForCausalLM:
    teacher = make_model("llama").eval()
    with torch.no_grad():
        teacher.model.norm.weight.mul_(3)
    return teacher


class Distilled:
    """The loss of a student: also the distance from a teacher's logits."""

    def __init__(self, teacher: nn.Module):
        self.teacher = teacher

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(**batch).logits
        output = model(**batch)
        return output.loss + mse_loss(output.logits, target)


def two_plugins(stage: int, folder: Path) -> Done:
    """Of a student, with two micro-batches a step, and of a teacher that is not trained."""
    path = folder / f"teacher{RANK}"
    make_teacher().save_pretrained(path)
    adam = {"lr": "auto", "weight_decay": "auto", "torch_adam": True}
    warmup = {"warmup_min_lr": LR, "warmup_max_lr": LR, "warmup_num_steps": "auto"}
    of_student = config_of(stage) | {"gradient_clipping": CLIP}
    of_student |= {"optimizer": {"type": "AdamW", "params": adam}}
    of_student |= {"scheduler": {"type": "WarmupLR", "params": warmup}}
    of_teacher = config_of(stage) | {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
    settings = {"student": of_student, "teacher": of_teacher}
    plugins = {name: DeepSpeedPlugin(hf_ds_config=each) for name, each in settings.items()}
    accelerator = Accelerator(deepspeed_plugins=plugins, gradient_accumulation_steps=2)
    data = Tokens(ROWS, False)
    loader = torch.utils.data.DataLoader(data, ROWS // RANKS // 2, collate_fn=collate)
    student = make_model("llama")
    optimizer = DummyOptim(student.parameters(), lr=LR, weight_decay=0.0)
    schedule = DummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=2)
    student, optimizer, loader, schedule = accelerator.prepare(student, optimizer, loader, schedule)
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(LlamaForCausalLM.from_pretrained(path))
    teacher.eval()
    accelerator.state.select_deepspeed_plugin("student")
    loss_of, losses = Distilled(teacher), []
    for _ in range(STEPS):
        losses.append(0.0)
        for batch in loader:
            with accelerator.accumulate(student):
                loss = loss_of(student, batch)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses[-1] += loss.item() / 2
    assert teacher.optimizer is None and student.global_steps == STEPS
    state = accelerator.get_state_dict(student)
    if RANK == 0:
        accelerator.unwrap_model(student).save_pretrained(folder / "model", state_dict=state)
    return losses, reloaded(folder)


def reloaded(folder: Path) -> Weights:
    dist.barrier()
    return load_file(folder / "model" / "model.safetensors") if RANK == 0 else {}


def mean(losses: list[float]) -> list[float]:
    values = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(values)
    return (values / RANKS).tolist()


# By framework: its loop, whether its Trainer's log has the mean over ranks, and its loss.
CASES: dict[str, tuple[Callable[[int, Path], Done], bool, LossOf]] = {
    "OpenRLHF": (openrlhf, False, language_loss),
    "open-instruct": (open_instruct, False, language_loss),
    "ms-swift": (ms_swift, True, language_loss),
    "LLaMA-Factory": (llama_factory, True, pairwise_loss),
    "sentence-transformers": (sentence_transformers, True, ranking_loss),
    "accelerate": (two_plugins, False, Distilled(make_teacher())),
    "diffusers": (diffusers, False, language_loss),
    "Lightning Fabric": (lightning_fabric, False, language_loss),
}


def main() -> None:
    name, stage, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    loop, is_mean, loss_of = CASES[name]
    model = make_model("llama")
    expected, weights = plain(ValueHead(model) if loss_of is pairwise_loss else model, loss_of)
    losses, saved = loop(stage, folder)
    losses = losses if is_mean else mean(losses)
    if RANK == 0:
        # A file has a tied weight once.
        prefix = "pretrained_model." if loss_of is pairwise_loss else ""
        head, embedding = f"{prefix}lm_head.weight", f"{prefix}model.embed_tokens.weight"
        tied = saved.get(head, saved.get(embedding))
        saved |= {head: tied, embedding: tied}
        assert saved.keys() == weights.keys()
        assert all((saved[each] - weights[each]).abs().max() < 1e-5 for each in weights)
        assert losses == pytest.approx(expected, abs=1e-5) and losses[0] > losses[-1]


if __name__ == "__main__":
    main()
