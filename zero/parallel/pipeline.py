"""Pipeline parallelism: each rank has some of the model's layers, and an engine trains them over
the ranks that have the same layers.

torch's schedules (GPipe, 1F1B, interleaved 1F1B) decide which micro-batch runs when. The engine
sees the forwards and backwards of a model without some of its layers. All parameters keep their
names in the whole model, so checkpoints load into any number of stages. The engine's core only
reads an attribute of the model (`zero.core.layout.PIPELINE_PLACE`) and is told which part is
running (`hooks.run_part`).

    split     remove from the model what other ranks have
    Pipeline  run a schedule over the engine's model; a step is one call
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from zero.comm.world import group_timeout
from zero.core.layout import PIPELINE_PLACE
from zero.core.param_group import ParamGroup, owning_group
from zero.core.sharded_param import is_copy
from zero.engine import ZeroEngine
from zero.errors import UsageError, require_divisor
from zero.fragments import GRADIENT, ParameterState

IGNORED = -100  # a label that does not count


class _Elsewhere(nn.Module):
    """Replaces a module that another stage has, and returns its first argument.

    It keeps the module's attributes, such as `attention_type`, which models read.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        vars(self).update(vars(module) | vars(self))

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden


class Place:
    """One rank's stages of a model that is divided into `count` stages.

    Attributes:
        is_tied: whether the embedding is also the weight of the head on another rank.
        stage_of: the stage of each module that only one stage has, by name.
        own: the numbers of this rank's stages.
        switches: for each own stage, a (parent module, child's name, module) for each module that
            only one stage has: the module itself, or a placeholder.
    """

    def __init__(self, model: Any, rank: int, ranks: int, per_rank: int):
        self.rank = rank
        self.ranks = ranks
        self.count = ranks * per_rank
        self.own = list(range(rank, self.count, ranks))
        self.is_tied = False
        self.stage_of = _stages_of_modules(model, self.count)
        self.switches = {stage: self._modules(model, {stage}) for stage in self.own}

    def _modules(
        self, model: nn.Module, kept: Collection[int]
    ) -> list[tuple[nn.Module, str, nn.Module]]:
        found = []
        for name, stage in self.stage_of.items():
            parent, _, child = name.rpartition(".")
            module = model.get_submodule(name)
            here = module if stage in kept else _Elsewhere(module)
            found.append((model.get_submodule(parent), child, here))
        return found

    def prune(self, model: nn.Module) -> None:
        """Drop the modules of other ranks' stages."""
        for parent, child, module in self._modules(model, self.own):
            parent._modules[child] = module

    @torch.no_grad()
    def require_nothing_else(self, model: Any) -> None:
        """Raise UsageError if the model changes hidden states outside the modules that its plan
        names.
        """
        weight = model.get_input_embeddings().get_parameter("weight")
        size = model.config.get_text_config().hidden_size
        hidden = torch.randn(1, 2, size, dtype=weight.dtype, device=weight.device)
        problem = UsageError(
            f"pipeline: {type(model).__name__} changes hidden states or logits outside of the "
            "modules of its plan for pipelines, or unpacks what its layers return, as some models "
            "of transformers before 5.0 do: each stage would do it again"
        )
        with _switched(self._modules(model, ())):
            try:
                found = model(inputs_embeds=hidden, use_cache=False).logits
            except IndexError as error:  # it unpacks the tensor that replaces a tuple
                raise problem from error
        if not torch.equal(found, hidden):
            raise problem


@contextmanager
def _switched(modules: list[tuple[nn.Module, str, nn.Module]]) -> Iterator[None]:
    """Context in which the parents have these modules as their children."""
    before = [(parent, child, parent._modules[child]) for parent, child, _ in modules]
    for parent, child, module in modules:
        parent._modules[child] = module
    try:
        yield
    finally:
        for parent, child, module in before:
            parent._modules[child] = module


def _stages_of_modules(model: Any, count: int) -> dict[str, int]:
    """Return the stage of each module that only one stage has, by name, as listed in transformers'
    plans for pipelines.
    """
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None)
    output = model.get_output_embeddings() if plan else None
    if not plan or output is None:
        raise UsageError(
            f"pipeline: {type(model).__name__} has no plan for a pipeline (base_model_pp_plan) and "
            "a head, as causal language models of transformers have. T5's stages would all need "
            "the encoder's output"
        )
    head = [name for name, module in model.named_modules() if module is output]
    prefix = f"{model.base_model_prefix}."
    stages, last = {}, False
    for name in plan:
        module = model.get_submodule(prefix + name)
        if isinstance(module, nn.ModuleList):
            layers = f"the number of layers in {prefix}{name}"
            require_divisor("pipeline", count, layers, len(module))
            for i in range(len(module)):
                stages[f"{prefix}{name}.{i}"] = i // (len(module) // count)
            last = True
        else:
            stages[prefix + name] = count - 1 if last else 0
    return stages | dict.fromkeys(head, count - 1)


def _dimension(mesh: DeviceMesh) -> int:
    names = mesh.mesh_dim_names or ()
    if "pp" not in names:
        raise UsageError(f"pipeline: the mesh's dimensions are {names}; one named 'pp' is missing")
    return names.index("pp")


def split(model: Any, mesh: DeviceMesh, stages_per_rank: int = 1) -> Any:
    """Divide a model into pipeline stages, and drop the layers of other ranks' stages.

    Call it before `zero.initialize`, and pass the same mesh to both. The number of stages is the
    size of the mesh's dimension `pp`, times `stages_per_rank`, and all stages have the same number
    of layers. With P ranks, rank r has the stages r, r + P, and so on. The first stage also has the
    embedding, and the last one the final norm and the head.

    Raises:
        ValueError: if the model has no plan for pipelines, or changes hidden states outside the
            modules of its plan; if its layers cannot be divided equally; or if it was built under
            `Init`.
    """
    for name, param in model.named_parameters():
        if owning_group(param) is not None:
            raise UsageError(
                f"pipeline: zero.Init has sharded {name!r} over all ranks: build a model for a "
                "pipeline without it"
            )
    dimension = _dimension(mesh)
    rank, ranks = mesh.get_local_rank(dimension), mesh.size(dimension)
    place = Place(model, rank, ranks, stages_per_rank)
    place.require_nothing_else(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    place.is_tied = tied and ranks > 1
    if place.is_tied and rank == ranks - 1:
        # It keeps the embedding, so that the weight has the same name as in the whole model.
        for name in [name for name in place.stage_of if model.get_submodule(name) is embedding]:
            del place.stage_of[name]
    place.prune(model)
    # transformers shards modules over `tp` by their names, which is impossible for modules that are
    # on other ranks.
    model._tp_plan = {
        name: style
        for name, style in (model._tp_plan or {}).items()
        if place.stage_of.get(name, rank) in place.own
    }
    setattr(model, PIPELINE_PLACE, place)
    return model


class _Stage(nn.Module):
    """One stage of the engine's model, as torch's schedules call it: it takes ids or hidden states,
    and returns hidden states or logits.
    """

    engine: Any

    def __init__(
        self, engine: ZeroEngine, place: Place, number: int, before: Callable[[int], None]
    ):
        super().__init__()
        object.__setattr__(self, "engine", engine)  # not as a submodule
        self.place = place
        self.number = number
        self.before = before

    def forward(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.before(self.number)
        name = "input_ids" if self.number == 0 else "inputs_embeds"
        with _switched(self.place.switches[self.number]):  # the model runs only this stage
            return self.engine(**{name: tensor}, use_cache=False, **kwargs).logits


class _TorchStage(PipelineStage):
    """torch's stage, which notifies the pipeline of each backward."""

    before_backward: Callable[[int], None]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return the messages with which neighbours connect.

        torch 2.9 sends an int64 where the neighbour expects an fp32, and gloo ends the process.
        Newest releases do not call this.
        """
        messages = super()._get_init_p2p_neighbors_ops()
        for message in messages:
            message.tensor = message.tensor.float()
        return messages

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        if self.has_backward:  # schedules also call this during evaluation
            self.before_backward(self.stage_index)
        super().backward_one_chunk(*args, **kwargs)


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the next tokens' cross-entropies, without labels of -100. Logits: (batch,
    length, vocabulary), fp32.
    """
    logits, labels = logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def count_next_tokens(labels: torch.Tensor) -> torch.Tensor:
    return (labels[:, 1:] != IGNORED).sum()


class Pipeline:
    """Trains a model that `split` has divided into stages, with one of torch's schedules.

    Args:
        engine: the engine of the model, made with the same mesh. A schedule has
            `gradient_accumulation_steps` micro-batches of `train_micro_batch_size_per_gpu` rows.
        length: the length of all sequences.
        schedule: one of torch's classes `ScheduleGPipe`, `Schedule1F1B` and
            `ScheduleInterleaved1F1B`, which do not split the backward pass.
        loss: a function that returns the sum of the losses from logits and labels. Default: the
            cross-entropy of the next tokens.
        count: a function that returns the number of these losses from the labels.

    Attributes:
        stages: torch's stages on this rank.
        schedule: torch's schedule.
    """

    def __init__(
        self,
        engine: ZeroEngine,
        mesh: DeviceMesh,
        length: int,
        schedule: Any = Schedule1F1B,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = next_token_loss,
        count: Callable[[torch.Tensor], torch.Tensor] = count_next_tokens,
    ):
        place = getattr(engine.module, PIPELINE_PLACE, None)
        if not isinstance(place, Place):
            call = "zero.parallel.pipeline.split before zero.initialize"
            raise UsageError(f"Pipeline: the model has not been split: call {call}")
        self.engine = engine
        self._place = place
        self._loss = loss
        self._count = count
        self._micro_batches = engine.settings.gradient_accumulation_steps or 1
        multiple = PipelineScheduleMulti in schedule.__mro__
        if not multiple and len(place.own) > 1:
            raise UsageError(
                f"Pipeline: {schedule.__name__} runs one stage per rank, and split has made "
                f"{len(place.own)}"
            )
        if self._micro_batches < place.ranks:
            raise UsageError(
                f"Pipeline: gradient_accumulation_steps is {self._micro_batches}; a pipeline of "
                f"{place.ranks} ranks needs at least as many micro-batches"
            )
        self._absent = {stage: self._absent_from(stage) for stage in place.own}
        self.is_first = 0 in place.own
        self.is_last = place.count - 1 in place.own
        group = mesh.get_group(_dimension(mesh))
        self.stages = [self._torch_stage(number, length, group) for number in place.own]
        stages = self.stages if multiple else self.stages[0]
        self.schedule = schedule(stages, self._micro_batches, self._scaled_loss, scale_grads=False)
        self._left = 0
        self._factor = 1.0
        if place.is_tied:
            self._tie(mesh)

    def _torch_stage(self, number: int, length: int, group: dist.ProcessGroup) -> _TorchStage:
        """Build a stage with the shapes that it exchanges. Otherwise torch would run an extra
        forward and backward to find them.
        """
        engine, place = self.engine, self._place
        config = cast(Any, engine.module).config.get_text_config()
        rows = engine.settings.train_micro_batch_size_per_gpu or 1

        def values(*sizes: int) -> torch.Tensor:
            dtype = engine.settings.compute_dtype
            return torch.empty(*sizes, dtype=dtype, device="meta", requires_grad=True)

        taken = given = values(rows, length, config.hidden_size)
        if number == 0:
            taken = torch.empty(rows, length, dtype=torch.int64, device="meta")
        if number == place.count - 1:
            given = values(rows, length, config.vocab_size)
        module, device = _Stage(engine, place, number, self._tell_stage), engine.comm.device
        made = _TorchStage(module, number, place.count, device, taken, given, group=group)
        made.before_backward = self._before_backward
        return made

    def _tie(self, mesh: DeviceMesh) -> None:
        """If the embedding is also the head's weight, have its gradients summed over its two
        owners.
        """
        pipelines = mesh.mesh.movedim(_dimension(mesh), -1).flatten(0, -2)
        groups = pipelines[:, [0, -1]].tolist()
        groups += [[rank] for rank in pipelines[:, 1:-1].flatten().tolist()]
        group: Any = dist.new_subgroups_by_enumeration(groups, timeout=group_timeout())[0]
        if self.engine.optimizer is not None and (self.is_first or self.is_last):
            weight = cast(Any, self.engine.module).get_input_embeddings().weight
            weight._zero_is_copy = is_copy(weight) or not self.is_first
            owner = owning_group(weight)
            assert owner is not None, "the engine has taken over all parameters"
            # In a separate group, the weight is sharded in the same way on both stages.
            place = owner.layout.slots[owner.index[weight]], owner.layout.padded
            places: list[object] = [None] * dist.get_world_size(group)
            dist.all_gather_object(places, place, group=group)
            in_shards = places[0] == places[-1]
            sum_gradient = partial(_sum_gradient, weight, group, in_shards)
            self.engine.optimizer.before_norm.append(sum_gradient)

    def _tell_stage(self, stage: int) -> None:
        """Set the stage of the engine's next forward or backward."""
        if len(self._place.own) > 1:
            self.engine.hooks.run_part(stage, self._absent[stage])

    def _absent_from(self, stage: int) -> frozenset[ParamGroup]:
        """Return the groups whose modules all belong to other stages of this rank."""
        own = self._place.own
        switches = [each for other in own if other != stage for each in self._place.switches[other]]
        others = {inner for *_, module in switches for inner in module.modules()}
        groups = self.engine.groups
        return frozenset(g for g in groups if g.modules and others.issuperset(g.modules))

    def _before_backward(self, stage: int) -> None:
        self._left -= 1
        if not self._left:  # this count tells the engine that it is the last backward of a step
            self.engine.micro_steps += self._micro_batches - 1
        self.engine.micro_batches.loss_was_scaled = True  # on other ranks
        self._tell_stage(stage)

    def _scaled_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = self._loss(logits, labels) * self._factor
        return self.engine.scale(loss) if loss.requires_grad else loss

    def step(self, ids: torch.Tensor, labels: torch.Tensor, **kwargs: torch.Tensor) -> float:
        """Train on this rank's rows of a batch: all micro-batches, then an optimizer step. All
        ranks must call.

        Args:
            ids, labels: int64, (micro-batches * rows, length), equal on the ranks of one pipeline.
            kwargs: tensors for the same rows that each stage gets, such as `attention_mask`.

        Returns the mean loss over all labels of the whole batch that count, on all ranks.
        """
        scaler = self.engine.scaler
        scale = 1.0 if scaler is None else scaler.scale
        losses = [loss / scale for loss in self._run(self.schedule.step, ids, labels, kwargs)]
        if self.engine.monitor is not None:
            for loss in losses:
                self.engine.monitor.loss(loss / self._micro_batches)
        self.engine.step()
        return self._mean(losses)

    @torch.no_grad()
    def evaluate(self, ids: torch.Tensor, labels: torch.Tensor, **kwargs: torch.Tensor) -> float:
        """Like `step`, but without backward and update; for `engine.eval()`."""
        if not hasattr(self.schedule, "eval"):
            raise UsageError("Pipeline.evaluate: torch's schedules only train before torch 2.9")
        return self._mean(self._run(self.schedule.eval, ids, labels, kwargs))

    def _run(
        self, run: Callable, ids: torch.Tensor, labels: torch.Tensor, kwargs: dict
    ) -> list[torch.Tensor]:
        """Return the micro-batches' losses, on ranks with the last stage."""
        engine = self.engine
        # A schedule that ended in an exception may have counted its micro-batches.
        engine.micro_steps -= engine.micro_steps % self._micro_batches
        tokens = self._count(labels).to(engine.comm.device, torch.float64)
        engine.comm.all_reduce(tokens)
        # The engine divides by the number of micro-batches and of ranks with different batches.
        self._factor = self._micro_batches * engine.comm.world_size / max(tokens.item(), 1)
        self._left = self._micro_batches * len(self.stages)
        losses: list[torch.Tensor] = []
        target = labels.to(engine.comm.device) if self.is_last else None
        inputs = (ids.to(engine.comm.device),) if self.is_first else ()
        run(*inputs, target=target, losses=losses if self.is_last else None, **kwargs)
        return [loss.detach() for loss in losses]

    def _mean(self, losses: list[torch.Tensor]) -> float:
        """Return the mean over all labels of the whole batch that count, on all ranks.

        Ranks of one tensor-parallel group have equal losses.
        """
        job = self.engine.comm.job
        total = sum(losses, torch.zeros((), device=self.engine.comm.device)).double().view(1)
        total = job.all_reduce(total).item()
        return total * self._place.ranks / (self._micro_batches * job.world_size)


def _sum_gradient(param: nn.Parameter, group: Any, in_shards: bool) -> None:
    """Sum the reduced gradient of `param` over `group`, whose ranks also have this parameter.

    `in_shards`: all of them hold the same part of it. Otherwise the whole gradient is exchanged."""
    state = ParameterState(param, GRADIENT)
    read, write = state.read_full, state.write_full
    if in_shards:
        read, write = state.read_local, state.write_local
    if (grad := read()) is not None:
        dist.all_reduce(grad, group=group)
        write(grad)
