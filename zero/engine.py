"""The engine: forward, backward and step over sharded state.

It computes nothing itself: `zero/build.py` makes its parts, and each method calls them."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from zero import build
from zero.checkpoint import folder as folders
from zero.checkpoint import training
from zero.checkpoint.export import Weights, save_16bit_model, show_copies_in_state_dicts
from zero.checkpoint.state import EngineState, Progress
from zero.checkpoint.training import BackgroundSaves, wait_for_background_saves
from zero.comm.communicator import Communicator, communicator
from zero.config import Config, ResolvedConfig
from zero.config.table import announce
from zero.conversion import deepspeed
from zero.core.forward_writes import ForwardWrites
from zero.core.gathering import Gathering
from zero.core.hooks import ModuleHooks
from zero.core.layout import called_blocks
from zero.core.micro_batches import MicroBatches
from zero.core.optimizer_shard import WEIGHTS, states_named
from zero.core.param_group import State
from zero.core.reduction import ReductionOrder
from zero.core.schedule import Residency
from zero.core.sharded_param import ShardedParameter, placeholder
from zero.device import empty_cache, is_accelerator, synchronize
from zero.errors import UsageError
from zero.offload.activations import HostActivations
from zero.offload.tiers import Tier, scratch_file, trim
from zero.optim.loss_scaler import LossScaler
from zero.optim.sharded_optimizer import NonFiniteGradientError, ZeroOptimizer, param_group_of
from zero.parallel.experts import agree_on_slices
from zero.slicing.batches import BatchSlices
from zero.slicing.blocks import SlicedBlock

logger = logging.getLogger("zero")

# Steps in a row that may be skipped without fp16.
SKIPS_ALLOWED = 3

_engine_of: WeakKeyDictionary[nn.Module, weakref.ref[ZeroEngine]] = WeakKeyDictionary()


class StepMonitor(Protocol):
    """What the engine tells of its steps, such as to `zero.monitor.monitor.Monitor`."""

    def loss(self, loss: torch.Tensor) -> None: ...

    def end_step(self) -> None: ...

    def close(self) -> None: ...


class Adapts(Protocol):
    """Repeats forwards and backwards for which memory was not enough: see `zero.adapting`."""

    def forward(self, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any: ...

    def backward(self, run: Callable[[], torch.Tensor], retain_graph: bool) -> torch.Tensor: ...

    def require_repeatable(self) -> None: ...


class ZeroEngine(nn.Module):
    """A model whose optimizer state (from stage 1 on), gradients (from stage 2 on) and parameters
    (at stage 3) are sharded over all ranks.

    Call it like the model, and call `backward(loss)` and `step()` for each micro-batch. You get an
    engine from `zero.initialize`, which also handles the sections `optimizer`, `scheduler`,
    `leaf_module` and `sequence_parallel_size`, `log_level` and the monitors.

    Args:
        optimizer: an optimizer over the model's parameters, or None.
        lr_scheduler: a scheduler of that optimizer, a function that makes one from the optimizer,
            or None.
        comm: the communicator of the ranks that share this model. Default: all ranks.

    Attributes:
        module: your model.
        optimizer: a `ZeroOptimizer`, or None.
        lr_scheduler: the scheduler, which advances after each step that was not skipped, or None.
        config: your configuration as a dict.
        global_steps, micro_steps, skipped_steps: counters.
        global_samples: samples of all ranks in all steps so far.
        micro_batches: shared with the hooks and the reducer.
        residency: the number of gathered elements, now and at its peak.
        activations: `HostActivations` if `cpu_checkpointing` or `nvme_path` is set, or None.
        is_compiled: whether `compile` was called.
        monitor: the object that records each step, or None.
        adaptation: changes what is done where memory runs out, or None.
        after_step: called with the number of each step that is over, or None.
    """

    optimizer_class = ZeroOptimizer
    monitor: StepMonitor | None = None
    adaptation: Adapts | None = None
    after_step: Callable[[int], None] | None = None
    _skips_in_a_row = 0
    _is_destroyed = False
    _lost_its_hooks = False

    def __init__(
        self,
        model: nn.Module,
        settings: Config,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        comm: Communicator | None = None,
    ):
        super().__init__()
        comm = comm or communicator()
        settings = settings.resolve(comm.world_size)
        self._begin(model, settings, comm)
        if comm.job.rank == 0:
            announce(settings, build.describe(model, optimizer, settings, comm))
            for old, new in settings.origin.renamed:
                logger.warning("%s is an old name of %s", old, new)
        if settings.watchdog_timeout is not None:
            comm.watchdog.timeout = settings.watchdog_timeout
        # The Trainer makes an engine of the same model for each training.
        earlier = _engine_of.get(model, lambda: None)()
        if earlier is not None:
            earlier.destroy()
        build.require_agreement(comm, settings, model, optimizer)
        with self._installed as on_failure:
            self._build(optimizer, comm)
            self.lr_scheduler = build.make_scheduler(lr_scheduler, optimizer)
            if settings.compile.enabled:
                self.compile(settings.compile.backend, settings.compile.kwargs)
            self._installed = on_failure.pop_all()
        _engine_of[model] = weakref.ref(self)
        self.comm.watchdog.has_engine = True

    def _build(self, optimizer: torch.optim.Optimizer | None, comm: Communicator) -> None:
        """Shard the model, and put the hooks on it."""
        model, settings = self.module, self.settings
        self.comm = comm.within(settings.zero_optimization.shards_over(comm.world_size))
        group_of = param_group_of(optimizer) if optimizer is not None else {}
        self.groups = build.make_groups(model, settings, self.comm, self.residency, group_of)
        build.place_buffers(model, self.comm, settings.buffer_dtype)
        self.schedule = build.make_schedule(self.groups, settings)
        if self.comm.job.rank == 0 and self.comm.shard_group.size > 1:
            build.warn_if_crowded(self.groups, self.schedule.max_live_parameters)
        trains, device = optimizer is not None, self.comm.device
        shards = build.make_shards(self.groups, settings, device, trains)
        training_comm = build.make_training_comm(settings, self.comm, self.groups)
        self.reducer = build.make_reducer(settings, training_comm, shards, self.micro_batches)
        show_copies_in_state_dicts(model)
        reductions = ReductionOrder(self.groups, self.reducer, self.comm)
        writes = ForwardWrites(self.groups)
        gathering = Gathering(
            self.groups, self.schedule, training_comm, self.residency, reductions, writes
        )
        self._sliced = build.slice_experts(self.groups, self.schedule, gathering)
        for each in self._sliced:
            self._installed.callback(each.remove)
        agree = agree_on_slices(model, self.comm)
        self.slices = BatchSlices(model, settings, lambda: self.global_steps, agree)
        self._installed.callback(self.slices.remove)
        self.slices.begin()
        self.hooks = ModuleHooks(
            model,
            self.groups,
            gathering,
            reductions,
            self.micro_batches,
            ignore_unused=settings.zero_optimization.ignore_unused_parameters,
        )
        self._installed.callback(self.hooks.remove)
        kept = settings.activation_checkpointing
        if kept.nvme_path or (kept.cpu_checkpointing and is_accelerator(self.comm.device)):
            file = scratch_file(kept.nvme_path, settings.aio) if kept.nvme_path else None
            self.activations = HostActivations(
                self.comm.device, Tier(torch.device("cpu"), file=file)
            )
        if optimizer is not None:
            self.optimizer = build.make_optimizer(
                self.optimizer_class,
                optimizer,
                settings,
                reducer=self.reducer,
                shards=shards,
                scaler=self.scaler,
                groups=self.groups,
                schedule=self.schedule,
                steps=lambda: self.global_steps,
            )
            self.optimizer.writes = writes
            writes.end_of_step()
            build.tell_time_of_files(self.groups, self.optimizer, settings, comm)
        if settings.checkpoint.async_save:
            self._saves = BackgroundSaves(self.comm, self.optimizer)

    def _begin(self, model: nn.Module, settings: ResolvedConfig, comm: Communicator) -> None:
        """Set what an engine has before its model is sharded; `zero verify` trains with no more."""
        self.module = model
        self.settings = settings
        self.config = settings.origin.raw
        self.comm = comm
        self.global_steps = self.skipped_steps = self.global_samples = 0
        self.micro_batches = MicroBatches(
            settings.gradient_accumulation_steps,
            settings.managed_gradient_accumulation,
            scales_loss=settings.fp16.enabled,
        )
        self._step_applied = self.is_compiled = False
        self.residency = Residency()
        self._installed = ExitStack()  # what is on the model
        self.activations: HostActivations | None = None
        self.scaler = LossScaler(settings.fp16) if settings.fp16.enabled else None
        self.optimizer: ZeroOptimizer | None = None
        self._saves: BackgroundSaves | None = None

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise UsageError(
            "an engine cannot be copied: copy.deepcopy(engine.module), called on all ranks, gives "
            "an ordinary model with all weights"
        )

    # -- training

    def explain(self, error: Exception) -> None:
        """Called with each error of a forward, backward or step, to add to what it says."""

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.explain(error)
            raise

    def forward(self, *args: object, **kwargs: object) -> object:
        with self._explained():
            if self.adaptation is None:
                return self._forward(*args, **kwargs)
            return self.adaptation.forward(self._forward, args, kwargs)

    def _forward(self, *args: object, **kwargs: object) -> object:
        if self._lost_its_hooks or (self._is_destroyed and torch.is_grad_enabled()):
            raise UsageError(
                "this engine was destroyed, for example by accelerator.free_memory(), so it cannot "
                "train or gather sharded parameters: make a new engine. transformers' Trainer "
                "destroys its engine in train(), and then uses it: do not call evaluate() before "
                "train(), and make a new Trainer with the same model before a second train()"
            )
        self.micro_batches.refuse_offloaded("forward")
        with self.comm.clock.phase("forward"):
            if self.activations is None or not torch.is_grad_enabled():
                return self.module(*args, **kwargs)
            with self.activations.context(group.full for group in self.groups):
                return self.module(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run the backward pass of one micro-batch, and reduce the gradients.

        `loss.backward()` does the same, except for the loss scaling that fp16 needs: see `scale`.

        Args:
            loss: a scalar, the mean over this rank's micro-batch.
            scale_wrt_gas: whether to divide the loss by `gradient_accumulation_steps`.

        Returns:
            The loss, divided if `scale_wrt_gas` is true.
        """
        run = partial(self._backward, loss, retain_graph, scale_wrt_gas)
        with self._explained():
            return run() if self.adaptation is None else self.adaptation.backward(run, retain_graph)

    def _backward(
        self, loss: torch.Tensor, retain_graph: bool, scale_wrt_gas: bool
    ) -> torch.Tensor:
        steps = self.settings.gradient_accumulation_steps
        if scale_wrt_gas and steps > 1:
            loss = loss / steps
        if self.monitor is not None:
            self.monitor.loss(loss)
        try:
            with (
                self.micro_batches.engine_backward(scale_wrt_gas),
                self.comm.clock.phase("backward"),
            ):
                self.scale(loss).backward(retain_graph=retain_graph)
        except BaseException:
            self.hooks.forget_broken_pass()
            raise
        return loss

    def scale(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """Return the loss multiplied by the current loss scale, so that you can call `backward()`
        on it yourself.

        Do not divide the loss by `gradient_accumulation_steps`: if you run the backward pass
        yourself, the gradients are divided when they reach the parameters. `retain_graph` is
        accepted for compatibility."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(
                f"the loss must be a scalar tensor with a gradient function, got {loss!r:.80}"
            )
        self._required_optimizer("backward")
        self.micro_batches.loss_was_scaled = True
        # In fp32: the product overflows fp16 long before the gradients do.
        return loss if self.scaler is None else loss.float() * self.scaler.scale

    def step(self) -> None:
        """End a micro-batch. After the last one of a step, update the parameters and advance the
        learning-rate schedule.
        """
        optimizer = self._required_optimizer("step")
        if self.micro_batches.holds_back:
            raise UsageError(
                "It is illegal to call Engine.step() inside no_sync context manager: leave it first"
            )
        if self.adaptation is not None:
            self.adaptation.require_repeatable()
        boundary = self.ends_step
        self.micro_batches.refuse_offloaded("step")
        if boundary:
            self._refuse_use("the step")
        self._step_applied = False
        if not boundary:
            self.micro_steps += 1
            return
        if folders.to_sync is not None:
            folders.sync()
        if self._saves is not None:
            self._saves.check()
        samples = self._samples_of_step()
        with self._explained(), self.comm.clock.phase("step"):
            self._step_applied = optimizer.step()
        # A step that has raised an error does not count, and can be called again.
        self.micro_steps += 1
        self.global_steps += 1
        self.global_samples += samples
        if self.monitor is not None:
            self.monitor.end_step()
        if self.after_step is not None:
            self.after_step(self.global_steps)
        if self._step_applied:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
            self._skips_in_a_row = 0
            return
        self.skipped_steps += 1
        self._skips_in_a_row += 1
        if self.scaler is not None and self.comm.job.rank == 0:
            logger.info(
                "overflow: step %d skipped, loss scale now %g", self.global_steps, self.scaler.scale
            )
        # In fp16 the loss scale may still fall.
        if self.scaler is None and self._skips_in_a_row >= SKIPS_ALLOWED:
            raise NonFiniteGradientError(
                f"the gradients of {SKIPS_ALLOWED} steps in a row were not finite, so nothing "
                "is learned: look for non-finite inputs, a learning rate that is too high, or a "
                "weight that became infinite (the warnings above name the first parameter)"
            )

    def _required_optimizer(self, what: str) -> ZeroOptimizer:
        if self.optimizer is None:
            raise UsageError(
                f"{what}: this engine has no optimizer; pass one to initialize() or configure "
                "'optimizer'"
            )
        return self.optimizer

    def _refuse_use(self, before: str) -> None:
        """Raise UsageError if unsharded values are in use: they cannot be updated or moved then."""
        # groups of a forward without a backward are still unsharded
        self.hooks.forget_broken_pass()
        for group in self.groups:
            if group.is_in_use and not group.persistent:
                raise UsageError(
                    f"{group} is gathered by GatheredParameters: leave that context before {before}"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the accumulated gradients. `step` does this too, so you rarely need it."""
        self.reducer.clear()

    def was_step_applied(self) -> bool:
        """Whether the last call of `step()` updated the parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """The 2-norm of the last step's gradient over all parameters, before clipping, or None
        before the first step.
        """
        return None if self.optimizer is None else self.optimizer.grad_norm

    def reshard(self) -> None:
        """Free all gathered parameters that are not in use."""
        for group in self.groups:
            if group.state in (State.GATHERING, State.GATHERED):
                group.reshard()

    def offload_states(
        self,
        include: Collection[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move training state to host memory between two steps, for example to make room for text
        generation. Call `reload_states` before the next forward.

        Args:
            include: what to move, by the names in `zero.core.optimizer_shard.STATES`. Default:
                everything.
            device: "cpu", or "none", which moves nothing.
            pin_memory: whether to use page-locked memory.
            non_blocking: accepted for compatibility. The call returns when all copies are done.
        """
        if device != "cpu":
            if device == "none":
                return
            raise UsageError(f"offload_states: device {device!r}: states go to 'cpu' only")
        if self.settings.zero_optimization.offloads_params:
            raise UsageError(
                "offload_states: zero_optimization.offload_param keeps the parameters on the host "
                "already"
            )
        if self.optimizer is not None:
            self.optimizer.wait()
        self.reducer.drain()
        self._refuse_use("offload_states")
        self.reshard()
        names = states_named(include)
        host = Tier(torch.device("cpu"), pin_memory and is_accelerator(self.comm.device))
        self._move_states(names - self.micro_batches.offloaded, host)
        self.micro_batches.offloaded |= names
        empty_cache(self.comm.device)  # so that the script can use the freed memory

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the state that `offload_states` has moved back to the device."""
        self._move_states(self.micro_batches.offloaded, Tier(self.comm.device))
        self.micro_batches.offloaded = set()

    def _move_states(self, names: Collection[str], tier: Tier) -> None:
        if WEIGHTS in names:
            for group in self.groups:
                group.move_weights(tier)
        if self.optimizer is not None:
            self.optimizer.move(names, tier)

    # -- where a step ends, and when gradients are reduced

    @property
    def micro_steps(self) -> int:
        """The number of calls of `step()` so far."""
        return self.micro_batches.count

    @micro_steps.setter
    def micro_steps(self, count: int) -> None:
        self.micro_batches.count = count

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-batches. If not, each call of `step()` ends the
        accumulation.
        """
        return self.micro_batches.managed

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before the parameters are updated."""
        return self.micro_batches.is_last

    @property
    def ends_step(self) -> bool:
        """Whether the next call of `step()` updates the parameters."""
        return self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the current micro-batch is the last one of a step. From now on the engine
        no longer counts micro-batches itself.
        """
        if not self.managed_gradient_accumulation():
            raise UsageError(
                "set_gradient_accumulation_boundary: managed_gradient_accumulation is false, so "
                "that each step() is the boundary; leave the call out"
            )
        self.micro_batches.boundary = is_boundary

    def _samples_of_step(self) -> int:
        """At the end of an accumulation, before its gradients are forgotten."""
        steps = self.settings.gradient_accumulation_steps
        steps_made = steps if self.managed_gradient_accumulation() else self.reducer.backwards
        return self.settings.train_batch_size // steps * steps_made

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients are not reduced over the ranks, at stages 0 and 1.

        Leave it before you call `step()`.
        """
        stage = self.settings.zero_optimization.stage
        if stage >= 2:
            raise UsageError(
                f"no_sync context manager is incompatible with zero_optimization.stage {stage}: at "
                "this ZeRO stage no "
                "rank keeps whole gradients; use stage 1, or coalesce_grad_reduction()"
            )
        with self.micro_batches.holding_back("no_sync context manager reentry is unsupported"):
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """A context in which the gradients of several backward passes are reduced only once, when
        the context ends, at stages 1 to 3.

        Until then each rank holds full gradients, as at stage 1. Leave the context before you call
        `step()`. A boundary that is set inside is reset when the context ends."""
        if not self.managed_gradient_accumulation():
            raise UsageError(
                "coalesce_grad_reduction: managed_gradient_accumulation is false, so that step() "
                "ends the accumulation"
            )
        if self.settings.zero_optimization.stage == 0:
            raise NotImplementedError(
                "coalesce_grad_reduction acts at zero_optimization.stage 1 to 3; use no_sync()"
            )
        nested = "coalesce_grad_reduction cannot be nested inside another one or inside no_sync"
        boundary = self.micro_batches.boundary
        with self.micro_batches.holding_back(nested):
            try:
                with self.reducer.deferring():
                    yield
                self.hooks.leave_stand_ins()
            finally:
                self.micro_batches.boundary = boundary

    # -- weights out

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike,
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
        save_dtype: torch.dtype | None = None,
        max_file_bytes: int = 5 * 10**9,
    ) -> bool:
        """Write the whole model to safetensors files in `save_dir`, with `config.json` if it has a
        config. This takes bounded memory. Every rank must call it.

        At stage 3 this needs `stage3_gather_16bit_weights_on_model_save`. Without it, nothing is
        written, and the call returns False.

        Args:
            save_filename: the name of the file. A large model is split into several.
            exclude_frozen_parameters: whether to leave out parameters that are not trained.
            save_dtype: dtype of the weights. Default: the one in which they are trained.
            max_file_bytes: the largest size of a file.
        """
        zero = self.settings.zero_optimization
        if zero.stage == 3 and not zero.stage3_gather_16bit_weights_on_model_save:
            logger.warning(
                "stage3_gather_16bit_weights_on_model_save is false: %s not saved", save_filename
            )
            return False
        excluded = exclude_frozen_parameters
        weights = Weights(self.module, self.groups, self.comm, save_dtype, excluded)
        save_16bit_model(self.module, weights, save_dir, save_filename, max_file_bytes)
        return True

    # -- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike,
        tag: str | None = None,
        client_state: dict | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the training state to `save_dir/tag`. Every rank must call it.

        With `checkpoint.async_save` it returns before the checkpoint is complete.

        Args:
            tag: the name of the folder. Default: `global_stepN`. If the folder contains a
                checkpoint, that is replaced, while other files in it stay.
            client_state: a dict of your own, which `load_checkpoint` returns. It may contain
                numbers, strings, tensors, and lists, tuples and dicts of these.
            save_latest: whether this checkpoint is loaded when no tag is given.
            exclude_frozen_parameters: whether to leave out the weights of parameters that are not
                trained.

        Returns:
            True.

        Raises:
            OSError: if the disk is full or the folder cannot be written to.
            ValueError: for a bad tag, or a value that cannot be stored. All ranks raise the error,
                and earlier checkpoints are still there.
        """
        training.save_checkpoint(
            self._state(),
            save_dir,
            tag,
            client_state or {},
            latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            validation=self.settings.checkpoint.tag_validation,
            background=self._saves,
        )
        return True

    def _state(self) -> EngineState:
        return EngineState(
            module=self.module,
            groups=self.groups,
            comm=self.comm,
            optimizer=self.optimizer,
            scaler=self.scaler,
            lr_scheduler=self.lr_scheduler,
            reducer=self.reducer,
            stage=self.settings.zero_optimization.stage,
            progress=Progress(
                global_steps=self.global_steps,
                micro_steps=self.micro_steps,
                skipped_steps=self.skipped_steps,
                global_samples=self.global_samples,
                gradient_accumulation_steps=self.settings.gradient_accumulation_steps,
            ),
        )

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable | None = None,
    ) -> tuple[str | None, dict]:
        """Restore a checkpoint of `save_checkpoint` or of DeepSpeed, on any number of ranks. Every
        rank must call it.

        Random states are restored only if the number of ranks is the same, and not if the folder
        also contains those of the Trainer, which restores them itself.

        Args:
            load_dir: the `save_dir` of the save, or the checkpoint's own folder.
            tag: which checkpoint to load. Default: the latest.
            load_module_strict: whether the model must have the same parameters as the checkpoint.
                If not, the parameters that both have are loaded.
            load_optimizer_states: whether to load the optimizer's state and hyperparameters, and
                the loss scale.
            load_lr_scheduler_states: whether to load the learning-rate scheduler.
            load_module_only: whether to load only the weights.

        Returns:
            The checkpoint's folder, or None if you give no tag and there is no checkpoint.
            Your `client_state`, or an empty dict if there is none.

        Raises:
            ValueError: if a file is damaged, if the checkpoint does not fit this model or
                optimizer, or if `custom_load_fn` is given. All ranks raise it. For a damaged file
                it also names the newest earlier checkpoint that is intact.
            OSError: if files cannot be read.
        """
        if custom_load_fn is not None:
            raise UsageError(
                "load_checkpoint: custom_load_fn is not supported; load with "
                "load_module_strict=False instead"
            )
        folder, progress = training.load_checkpoint(
            self._state(),
            load_dir,
            tag,
            strict=load_module_strict,
            load_optimizer=load_optimizer_states,
            load_lr_scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
            open_deepspeed=deepspeed.open_,
        )
        accumulation = self.settings.gradient_accumulation_steps
        self.global_steps = progress.global_steps
        self.micro_steps = progress.micro_steps
        if accumulation != progress.gradient_accumulation_steps:
            self.micro_steps = progress.global_steps * accumulation
        self.skipped_steps = progress.skipped_steps
        self.global_samples = progress.global_samples
        return folder, progress.client_state

    def wait_for_checkpoint(self) -> None:
        """Wait until all asynchronous saves are complete. If one has failed, raise its error."""
        wait_for_background_saves()

    # -- module behaviour

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def _apply(self, fn: Callable, recurse: bool = True) -> ZeroEngine:
        """Called by `to`, `half`, `cuda` and the like, which are allowed only if they change
        nothing, because dtype and device come from the configuration.
        """
        for dtype in {group.dtype for group in self.groups}:
            before = placeholder(torch.Size([1]), dtype, self.comm.device)
            after = fn(before)
            if after.dtype != before.dtype or after.device != before.device:
                raise UsageError(
                    f"the engine's parameters are {before.dtype} on {before.device}; choose fp16, "
                    "bf16 or fp32 in the configuration instead of converting the engine to "
                    f"{after.dtype} on {after.device}"
                )
        return self

    def compile(
        self, backend: str | Callable = "inductor", compile_kwargs: dict | None = None
    ) -> None:
        """Compile each block with `torch.compile`, at every stage. A model without blocks is
        compiled as a whole.

        Blocks of the same class share a graph. Anything that differs between them, such as
        transformers' cache of keys and values, takes a graph for each block, so train with
        `use_cache=False`."""
        every = torch.compiler.list_backends(exclude_tags=())
        if isinstance(backend, str) and backend not in every:
            known = ", ".join(torch.compiler.list_backends())
            raise UsageError(f"compile: torch has no backend {backend!r}; it has {known}")
        # By default 8. A T5 has four kinds of blocks, each of which needs one more graph for
        # lengths that vary.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
        torch._dynamo.config.nontraceable_tensor_subclasses.add(ShardedParameter)
        for module in called_blocks(self.module) or [self.module]:
            # Slices of a batch are compiled, and not the loop over them.
            of_slices = isinstance(module.forward, SlicedBlock)
            compiled = module.forward if of_slices else module
            compiled.compile(backend=backend, **(compile_kwargs or {}))
        self.is_compiled = True

    def destroy(self) -> None:
        """Remove the hooks from the model, and free gathered parameters and optimizer state. The
        parameters stay sharded.
        """
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None
        self._installed.close()
        if self.optimizer is not None:
            self.optimizer.end_updates()
        synchronize(self.comm.device)  # copies from host memory that is about to be freed
        self.reducer.free()
        if self.optimizer is not None:
            self.optimizer.free()
        for group in self.groups:
            if not group.persistent and group.state is not State.SHARDED:
                group.reshard()
        trim()
        self._is_destroyed = True
        self._lost_its_hooks = not all(group.persistent for group in self.groups)
