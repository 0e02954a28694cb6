"""`initialize`, and the engine that it returns: `ZeroEngine` with the methods that DeepSpeed's
users know.

This file makes objects from the configuration: an optimizer, a schedule, leaf modules. It does not
know how an engine trains."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zero import monitor
from zero.adapting import Adaptation
from zero.checkpoint.export import Weights, consolidated_state_dict
from zero.comm import world
from zero.config import Config, ZeroConfig, load_config
from zero.config.monitor import FlopsProfilerConfig
from zero.engine import ZeroEngine
from zero.errors import FOLLOWED_RELEASE, UsageError
from zero.gathered_parameters import GatheredParameters
from zero.integrations.deepspeed import distributed
from zero.integrations.deepspeed.leaf import mark_configured
from zero.integrations.deepspeed.lr_schedules import build_scheduler
from zero.integrations.deepspeed.names import instead_of
from zero.integrations.deepspeed.optimizer import DeepSpeedOptimizer, ParameterOffload
from zero.integrations.deepspeed.optimizers import build_optimizer
from zero.integrations.deepspeed.sequence import share_sequences
from zero.integrations.deepspeed.tensor import share_model, with_new_parameters
from zero.integrations.hf import quantized_loading
from zero.integrations.hf.optimizers import refuse_dropped
from zero.monitor.out_of_memory import explain
from zero.optim.sharded_optimizer import ZeroOptimizer
from zero.parallel.sequence import MicroBatches, current_group

logger = logging.getLogger("zero")


# DeepSpeed's methods that return a setting, completed where it was left out, and its key.
_SETTINGS = {
    "zero_" + key.removeprefix("stage3_").removeprefix("zero_"): f"zero_optimization.{key}"
    for key in ZeroConfig.model_fields
} | {f"flops_profiler_{key}": f"flops_profiler.{key}" for key in FlopsProfilerConfig.model_fields}
_SETTINGS |= json.loads(Path(__file__).with_name("settings.json").read_text("utf-8"))

# DeepSpeed's attributes. The groups are for scripts: the engine has its own.
_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "basic_optimizer": lambda engine: engine.optimizer and engine.optimizer.optimizer,
    "communication_data_type": attrgetter("reducer.sum_dtype"),  # gradients are summed in it
    "data_parallel_group": lambda engine: distributed._get_data_parallel_group(),
    "device": attrgetter("comm.device"),
    "dp_world_size": lambda engine: distributed._get_data_parallel_world_size(),
    "global_rank": attrgetter("comm.job.rank"),
    "local_rank": lambda engine: distributed.get_local_rank(),
    "mp_world_size": lambda engine: distributed._get_model_parallel_world_size(),
    "world_size": attrgetter("comm.job.world_size"),
}


class DeepSpeedEngine(ZeroEngine):
    """`ZeroEngine` with DeepSpeed's names for its settings and its place. Made by `initialize`."""

    optimizer_class = DeepSpeedOptimizer
    # Of the dataset that `initialize` was given.
    training_dataloader: DataLoader | None = None
    mpu: object | None = None  # as `initialize` was given it
    sparse_tensor_module_names: frozenset[str] = frozenset()  # gradients are never sparse

    def __init__(self, model: nn.Module, settings: Config, *args: Any, **kwargs: Any):
        with self._explained():
            super().__init__(model, settings, *args, **kwargs)
        with ExitStack() as on_failure:
            on_failure.callback(self.destroy)
            self._add_sections()
            on_failure.pop_all()

    def _add_sections(self) -> None:
        """Make what the configuration adds to an engine with an optimizer."""
        offload = ParameterOffload(self.hooks)
        if isinstance(self.optimizer, DeepSpeedOptimizer):
            self.optimizer.parameter_offload = offload
            self.optimizer.engine = weakref.ref(self)
            self.monitor = monitor.make(self)
            if self.settings.on_out_of_memory == "adapt":
                self.adaptation = Adaptation(self)
            if (profiler := self.settings.flops_profiler).enabled:
                from zero.integrations.deepspeed.profiling import profile_of_step  # imports triton

                control = self.comm.control("opening the flops profiler")
                self.after_step = control.together(
                    lambda: None if control.rank else profile_of_step(profiler, self.module)
                )

    def explain(self, error: Exception) -> None:
        """Say what fills the memory, if that has run out."""
        explain(self, error)

    @property
    def seq_parallel_group(self) -> Any:
        """The ranks that share sequences with this one; None if there are none."""
        shared = self.settings.sequence_parallel_size > 1
        return distributed._get_sequence_parallel_group() if shared else None

    def __getattr__(self, name: str) -> Any:
        if name in _SETTINGS and "settings" in vars(self):
            return lambda: attrgetter(_SETTINGS[name])(self.settings)
        if name in _ATTRIBUTES and "comm" in vars(self):
            return _ATTRIBUTES[name](self)
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name in ("module", "optimizer") or hasattr(type(self), name):
                raise  # from a property of this class, or before there is a model
            raise AttributeError(
                f"neither zero's engine, which takes DeepSpeed's place, nor the model "
                f"({type(self.module).__name__}) has an attribute {name!r}; "
                + instead_of(name, "settings are in engine.config"),
                name=name,
                obj=self,
            ) from error

    # -- sizes of a batch

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, samples of a micro-batch, and micro-batches of a step."""
        settings = self.settings
        micro, steps = settings.train_micro_batch_size_per_gpu, settings.gradient_accumulation_steps
        return settings.train_batch_size, micro, steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches of a step, from the next step on, so that it has
        `train_batch_size` samples. All ranks must call it.

        Raises ValueError for a size that is no multiple of a micro-batch of all ranks, and within a
        step.
        """
        whole, micro, steps = self.get_batch_info()
        of_ranks = whole // steps
        if train_batch_size < 1 or train_batch_size % of_ranks:
            raise UsageError(
                f"set_train_batch_size: {train_batch_size} is not a multiple of {of_ranks}, one "
                f"micro-batch of {micro} samples of each rank"
            )
        self._set_batch(train_batch_size, micro, train_batch_size // of_ranks)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Say how many samples a micro-batch has from the next step on: they are counted, nothing
        else depends on it. All ranks must call it. Raises ValueError within a step.
        """
        whole, micro, steps = self.get_batch_info()
        self._set_batch(whole // micro * micro_batch_size, micro_batch_size, steps)

    def _set_batch(self, whole: int, micro: int, steps: int) -> None:
        if self.reducer.backwards:
            raise UsageError("the size of a batch can change between two steps, not within one")
        sizes = {"train_batch_size": whole, "train_micro_batch_size_per_gpu": micro}
        self.settings = self.settings.model_copy(
            update=sizes | {"gradient_accumulation_steps": steps}
        )
        if steps != self.micro_batches.steps:
            self.micro_batches.steps = steps
            self.micro_steps = self.global_steps * steps

    # -- what scripts ask and say

    def optimizer_name(self) -> str | None:
        """The configuration's type, in small letters, or the class of the script's optimizer."""
        if (section := self.settings.optimizer) is not None:
            return section.type.lower()
        return None if self.optimizer is None else type(self.optimizer.optimizer).__name__

    def scheduler_name(self) -> str | None:
        """The type in the section `scheduler` of the configuration."""
        return self.settings.scheduler.type if self.settings.scheduler else None

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes during training."""
        return self.scaler is not None and self.scaler.dynamic

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all the optimizer's `param_groups`."""
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """`betas`, or else `momentum`, of each of the optimizer's `param_groups`."""
        groups = self.optimizer.param_groups if self.optimizer else ()
        return [group.get("betas", group.get("momentum")) for group in groups]

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Does nothing: backward has summed the gradients over the ranks."""

    # Scripts for DeepSpeed before 0.18.3 call it after a `loss.backward()` of several engines.
    _backward_epilogue = allreduce_gradients

    def module_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`engine.module.state_dict()`. Raises ValueError at stage 3."""
        if self.settings.zero_optimization.stage == 3:
            raise UsageError(
                "module_state_dict: weights are sharded at stage 3: save them by save_16bit_model, "
                "or read them inside of zero.GatheredParameters(engine.module.parameters())"
            )
        return self.module.state_dict(*args, **kwargs)

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Set the weights, at every stage. All ranks must call it; rank 0's values count."""
        with GatheredParameters(list(self.module.parameters()), modifier_rank=0):
            self.module.load_state_dict(state_dict, strict=strict)

    @property
    def returned_optimizer(self) -> torch.optim.Optimizer | ZeroOptimizer | None:
        """What `initialize` returns. As with DeepSpeed, nothing wraps the script's optimizer at
        stage 0 in fp32.

        A schedule-free one is an exception: its `train()` and `eval()` change weights.
        """
        settings = self.settings
        plain = settings.zero_optimization.stage == 0 and settings.compute_dtype == torch.float32
        if self.optimizer is None or not plain or hasattr(self.optimizer.optimizer, "eval"):
            return self.optimizer
        return self.optimizer.optimizer

    def loss_scale(self) -> float:
        """The current loss scale, or 1 without fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def get_lr(self) -> list[float]:
        """The learning rate of each of the optimizer's `param_groups`."""
        return [] if self.optimizer is None else [g["lr"] for g in self.optimizer.param_groups]

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict | None:
        # As with DeepSpeed, callers that must not gather a model ask for the setting themselves.
        _forget_unused_renamings(self.module)
        excluded = exclude_frozen_parameters
        weights = Weights(self.module, self.groups, self.comm, exclude_frozen=excluded)
        return consolidated_state_dict(self.module, weights)

    # accelerate calls this one where tensor parallelism is configured.
    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict
    empty_partition_cache = ZeroEngine.reshard
    save_fp16_model = ZeroEngine.save_16bit_model


def _forget_unused_renamings(model: nn.Module) -> None:
    """Let transformers save weights under the names that they have without ZeRO-3.

    It finds weights under older names by rules, which it reverts when it saves. It remembers the
    rules that it has used, but all rules if it loads at stage 3."""
    for module in model.modules():
        rules = getattr(module, "_weight_conversions", None)
        if rules and hasattr(rules[0], "was_used"):
            vars(module)["_weight_conversions"] = [rule for rule in rules if rule.was_used()]


# Makes the engine of a script; `zero verify` sets another function here.
make_engine: Callable[..., DeepSpeedEngine] = DeepSpeedEngine


def initialize(
    args: object | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable | None = None,
    model_parameters: Iterable | None = None,
    training_data: Dataset | None = None,
    lr_scheduler: object | None = None,
    distributed_port: int | None = None,
    mpu: object | None = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable | None = None,
    config: Any = None,
    mesh_param: object | None = None,
    config_params: Any = None,
    mesh: DeviceMesh | None = None,
) -> tuple[DeepSpeedEngine, Any, DataLoader | None, Any]:
    """Shard a model, and return an engine that trains it. This is the interface of
    `deepspeed.initialize`.

    Args:
        model: the model, an ordinary one or one that was built under `Init`. Its parameters are
            sharded in place.
        optimizer: a torch optimizer over the model's parameters, or a function that makes one from
            the parameters. It takes precedence over the section `optimizer` of the configuration.
        model_parameters: parameters or param groups for the optimizer of the configuration.
            Default: all parameters that require gradients.
        lr_scheduler: a scheduler of `optimizer`, or a function that makes one from the optimizer.
        training_data: a dataset, from which the returned data loader yields micro-batches. Each
            rank gets its own part.
        collate_fn: makes a micro-batch from samples of `training_data`.
        mesh_param: (data, sequence), where `sequence` is how many neighbouring ranks share each
            sequence. A model of transformers then attends to whole sequences. Any other model has
            to take care of that itself, for example with `DistributedAttention`, and its loader
            gives all of these ranks the same samples.
        mpu: for sequence parallelism, the result of
            `UlyssesSPAttentionHF.register_with_transformers`.
        config: the configuration as a path, a dict or JSON text. `config_params` and
            `args.deepspeed_config` have the same meaning.
        mesh: a `DeviceMesh` with some of the dimensions `pp` (see `zero.parallel.pipeline`),
            `replicate`, `shard` (the same as `mics_shard_size`) and `tp` (the same as
            `autotp_size`). Default: the mesh of accelerate's `ParallelismConfig`.

    Returns:
        The engine.
        The optimizer, or None if there is none.
        The data loader, or None without `training_data`.
        The learning-rate scheduler, or None if there is none.

    Raises:
        ValueError: for a wrong configuration, or an argument that is not supported. The message
            names the key or argument.
    """
    if model is None:
        raise UsageError("initialize: model is missing")
    sources = (config, config_params, getattr(args, "deepspeed_config", None))
    if (source := next((each for each in sources if each is not None), None)) is None:
        raise UsageError("initialize: config is missing: pass the ds_config as a path or a dict")
    refuse_dropped(optimizer)
    settings = load_config(source)
    if settings.log_level is not None:
        logger.setLevel(settings.log_level)
    world.init_distributed()
    quantized_loading.settle()
    settings, ranks_of_sample = share_sequences(model, settings, mpu, mesh_param)
    comm, replaced, settings = share_model(model, settings, mesh, ranks_of_sample)
    optimizer, model_parameters = with_new_parameters(optimizer, model_parameters, replaced)
    settings = settings.resolve(comm.world_size)
    settings.zero_optimization.shards_over(comm.world_size)
    if world.get_rank() == 0:
        logger.info("DeepSpeed info: version=%s; zero in its place", FOLLOWED_RELEASE)
    mark_configured(model, settings.zero_optimization.leaf_module)
    optimizer = build_optimizer(settings, optimizer, model_parameters, model)
    if lr_scheduler is None and settings.scheduler is not None and optimizer is not None:
        lr_scheduler = partial(build_scheduler, settings.scheduler)
    engine = make_engine(model, settings, optimizer, lr_scheduler, comm)
    engine.mpu = mpu
    averages = settings.gradient_allreduce_op == "mean"
    if averages and isinstance(engine.optimizer, DeepSpeedOptimizer):
        engine.optimizer.ranks_summed = ranks_of_sample
    if training_data is not None:
        with ExitStack() as on_failure:
            on_failure.callback(engine.destroy)
            engine.training_dataloader = _data_loader(training_data, collate_fn, engine)
            on_failure.pop_all()
    loader = engine.training_dataloader
    return engine, engine.returned_optimizer, loader, engine.lr_scheduler


def _data_loader(
    dataset: Dataset, collate_fn: Callable | None, engine: DeepSpeedEngine
) -> DataLoader:
    """Micro-batches of this rank's part of `dataset`.

    `loader.sampler.set_epoch` shuffles it again.
    """
    sampler, size = None, distributed._get_data_parallel_world_size()
    if not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, size, distributed._get_data_parallel_rank())
    rows = engine.settings.train_micro_batch_size_per_gpu
    loader = DataLoader(dataset, rows, sampler=sampler, collate_fn=collate_fn)
    ranks, shared = current_group(), size < engine.comm.world_size
    if engine.settings.sequence_parallel_size == 1 or ranks is None or shared:
        return loader
    return DataLoader(MicroBatches(loader, ranks), None)
