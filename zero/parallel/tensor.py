"""Tensor parallelism: models whose parameters are `DTensor`s, so that each rank of a model group
has a shard of each layer.

torch and transformers shard the layers and sum the results of the shards. This file prepares such a
model for an engine, which only sees the local shards, and shards an ordinary model by its own plan.
The engine knows the attributes that `prepare` sets (see `zero.core.sharded_param`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from zero.comm.communicator import Communicator
from zero.core.param_group import owning_group
from zero.core.quantized_weights import is_quantized, reachable
from zero.core.sharded_param import set_owner, show
from zero.errors import UsageError, require_divisor

# transformers' name for the way of sharding, by the name of the module or parameter.
Plan = Mapping[str, str]


class TPShard:
    """How the parameter `param` is sharded over its mesh: a `zero.core.sharded_param.Cut`."""

    def __init__(self, param: DTensor, holders: Communicator | None = None):
        self.holders = holders
        self._mesh = param.device_mesh
        self._placements = param.placements
        self._whole = {"shape": param.shape, "stride": param.stride()}
        placement: Any = param.placements[0]
        blocks = getattr(placement, "split_factor", 1)
        self.index = self._mesh.get_local_rank()
        self.described = [placement.dim % param.dim(), blocks, self._mesh.size()]

    def __deepcopy__(self, memo: dict) -> TPShard:
        """A copy of the parameter is split in the same way."""
        return self

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Join all ranks' parts to the whole. All ranks of the mesh must call it."""
        how = {"run_check": False, **self._whole}
        return DTensor.from_local(part, self._mesh, self._placements, **how).full_tensor()

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the whole."""
        return distribute_tensor(whole, self._mesh, self._placements, src_data_rank=None).to_local()


def mesh_in(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh of the model's DTensors, or None if it has no DTensors.

    Raises UsageError for several dimensions or sets of ranks, and for a model that `fully_shard`
    has wrapped."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            kind = type(module).__name__
            raise UsageError(
                f"fully_shard has sharded {kind}: leave that to ZeRO (without fsdp_size)"
            )
    found: DeviceMesh | None = None
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            continue
        mesh = param.device_mesh
        found = mesh if found is None else found
        # transformers makes another mesh for experts, with the same ranks
        if mesh.ndim > 1 or not torch.equal(mesh.mesh, found.mesh):
            raise UsageError(
                f"parameter {name!r} is a DTensor of {mesh}: cut the model over one mesh of one "
                "dimension, such as mesh['tp']; ZeRO shards over the other ranks"
            )
    return found


@torch.no_grad()
def prepare(
    model: nn.Module, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype | None
) -> None:
    """Prepare a model with DTensors on `mesh` for an engine that computes in `dtype` (None: their
    own dtypes).

    Ordinary parameters and buffers get the values of the mesh's first rank. All ranks must call it.
    """
    if mesh.device_type != device.type:
        raise UsageError(
            f"the model's DTensors are on a mesh of {mesh.device_type}, and the engine computes on "
            f"{device}"
        )
    for name, param in model.named_parameters():
        is_copy = mesh.get_local_rank() > 0
        if isinstance(param, DTensor):
            prepare_parameter(name, param, device, dtype)
            is_copy = is_copy and param.placements == (Replicate(),)
        vars(param)["_zero_is_copy"] = is_copy
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor) and owning_group(tensor) is None and tensor.numel():
            of_first = distribute_tensor(tensor.detach().to(device), mesh, [Replicate()])
            tensor.copy_(of_first.to_local())
    for module in _summed_over_ranks(model):
        # transformers sums these gradients in a hook that it adds in the first forward. This must
        # come before the engine's hook, which takes the gradient away.
        with torch.enable_grad():
            weight = module.get_parameter("weight")
            module(torch.zeros(1, *weight.shape, dtype=weight.dtype, device=weight.device))


@torch.no_grad()
def prepare_parameter(
    name: str,
    param: DTensor,
    device: torch.device,
    dtype: torch.dtype | None,
    holders: Communicator | None = None,
) -> None:
    """Prepare one sharded parameter. `holders`: the ranks that have the same part, if not all ranks
    of the engine do.
    """
    (placement,) = param.placements
    is_whole = isinstance(placement, Replicate)
    if not is_whole and not hasattr(placement, "dim"):
        raise UsageError(
            f"parameter {name!r} is a DTensor with the placement {placement}: it must be Shard or "
            "Replicate"
        )
    if owning_group(param) is not None:
        return  # already prepared for an earlier engine
    fits = (param.dtype, param.device) == (dtype, device)
    if dtype is not None and param.is_floating_point() and not fits:
        # A DTensor's dtype cannot change. Keep the object, because optimizers refer to it.
        moved = nn.Parameter(param.detach().to(device, dtype), param.requires_grad)
        torch.utils.swap_tensors(param, moved)
    if not is_whole:
        vars(param)["_zero_cut"] = TPShard(param, holders)
    if param.requires_grad:
        param.register_post_accumulate_grad_hook(partial(_shard_gradient, param.placements))


def _shard_gradient(placements: tuple, param: Any) -> None:
    """Give the gradient the parameter's placement, because it may still have to be summed over
    ranks or sharded.
    """
    if param.grad is not None and param.grad.placements != placements:
        param.grad = param.grad.redistribute(placements=placements)


# -- sharding an ordinary model


def make_mesh(
    size: int, world_size: int, device: torch.device, key: str = "tensor_parallel.autotp_size"
) -> DeviceMesh:
    """Return the mesh of this rank and its `size` - 1 neighbours. `key` sets the size. All ranks
    must call it.
    """
    require_divisor(key, size, "the number of ranks", world_size)
    mesh = torch.arange(world_size, device="cpu").view(-1, size)
    return DeviceMesh(device.type, mesh, mesh_dim_names=("dp", "tp"))["tp"]


@torch.no_grad()
def parallelize(
    model: nn.Module, mesh: DeviceMesh, whole_experts: bool
) -> dict[nn.Parameter, nn.Parameter]:
    """Shard a model over `mesh` by its own plan: transformers' `tp_plan`, or that of any model
    whose `config` has a `base_model_tp_plan`. Returns the new parameters, by the ones that they
    replace.

    whole_experts: each rank gets some of the experts, and tokens are sent to them (expert
    parallelism). Otherwise it gets a part of each expert. Raises UsageError for a model without a
    plan, and if the mesh does not divide its heads or experts. All ranks must call it."""
    planned, styles = _plan_of(model)
    if not styles:
        raise UsageError(
            f"{type(model).__name__} has no tp_plan, and its config no base_model_tp_plan: set one "
            "(docs/tensor-parallelism.md), or call "
            "torch.distributed.tensor.parallel.parallelize_module on it first, with a mesh of one "
            "dimension"
        )
    for module in model.modules():
        for adapter, config in getattr(module, "peft_config", {}).items():
            if config.peft_type == "PREFIX_TUNING":
                raise UsageError(
                    f"tensor parallelism: adapter {adapter!r} is prefix tuning, whose keys and "
                    "values are of all heads: use prompt tuning or LoRA"
                )
    styles = _plan_with_adapters(planned, styles)
    check_heads(planned, mesh.size())
    before = dict(planned.named_parameters(remove_duplicate=False))
    divided = {param for name, param in before.items() if name in styles}
    for name, param in before.items():
        if param in divided and is_quantized(param):
            raise UsageError(
                f"tensor parallelism: {name!r} is quantized, and its codes cannot be divided with "
                "what decodes them: train without tensor parallelism, at stage 3, which shards a "
                "quantized model over all ranks"
            )
        if param in divided and name not in styles:
            raise UsageError(
                f"tensor parallelism: {name!r} is tied to a weight that the plan names, and the "
                "plan does not name it: it must name both or neither"
            )
    return take_steps(planned, _steps(planned, styles, mesh, whole_experts))


def take_steps(
    planned: Any, steps: Iterable[tuple[str, Callable[[], object]]]
) -> dict[nn.Parameter, nn.Parameter]:
    """Shard the parameters and modules that are named, each by the function beside it. Returns the
    new parameters, by the ones that they replace.
    """
    found: dict[nn.Parameter, nn.Parameter] = {}
    before = dict(planned.named_parameters(remove_duplicate=False))
    for name, shard in steps:
        if (old := before.get(name)) is None:
            shard()
            continue
        path, _, attribute = name.rpartition(".")
        module = planned.get_submodule(path)
        if old not in found:  # it may be tied to one that is already sharded
            _take_back(old)
            shard()
            found[old] = new = module.get_parameter(attribute)
            if isinstance(new, DTensor):
                # otherwise it would keep the whole parameter's memory
                new._local_tensor = new._local_tensor.clone()
        module._parameters[attribute] = found[old]
    return found


def _plan_of(model: nn.Module) -> tuple[Any, Plan]:
    """Return the module of `model` that has a plan for tensor parallelism, and the styles by the
    names of its modules and parameters; no styles if there is none.
    """
    from transformers import PreTrainedModel, __version__

    if not hasattr(PreTrainedModel, "_expand_parallel_plan"):
        raise UsageError(
            "tensor parallelism: sharding a model by its plan needs transformers 5.23 or newer; "
            f"this is {__version__}. Call torch.distributed.tensor.parallel.parallelize_module on "
            "the model first"
        )
    for module in model.modules():
        config = getattr(module, "config", None)
        for own in (getattr(module, "tp_plan", None), getattr(config, "base_model_tp_plan", None)):
            # A method of transformers' models that only needs a module.
            expand: Any = PreTrainedModel._expand_parallel_plan
            if own and (found := expand(module, own)):
                return module, found
    return model, {}


# The styles that shard a linear layer by its outputs, and by its inputs.
_BY_OUTPUTS = ("colwise", "colwise_gather_output", "colwise_rep")
_BY_INPUTS = ("rowwise", "rowwise_split_input", "rowwise_rep")
_OF_LINEAR = (*_BY_OUTPUTS, *_BY_INPUTS)
# The styles that PEFT's trained copy of a module (`modules_to_save`) can share with the module.
_OF_COPIES = (*_OF_LINEAR, "embedding_rowwise", "embedding_colwise")


def _plan_with_adapters(planned: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the styles by name, with those of PEFT's adapters instead of the modules they wrap.

    LoRA computes `base(x) + B(A(x))`. If the outputs of the base layer are sharded, so are those of
    B, and if its inputs are sharded, so are those of A. The other matrix is whole on every rank and
    gets the same gradient there, because transformers' styles sum A's outputs, and the gradients of
    B's inputs.

    Raises UsageError for adapters that need a whole weight or activation."""
    found: dict[str, str] = {}
    modules = dict(planned.named_modules())
    for name, style in plan.items():
        module: Any = modules.get(name)
        kind = type(module).__name__
        if hasattr(module, "base_layer"):
            is_lora = hasattr(module, "lora_A") and isinstance(module.base_layer, nn.Linear)
            if not is_lora or style not in _OF_LINEAR or module.lora_variant:  # such as DoRA
                raise _not_sharded(name, style, kind)
            half = "lora_B" if style in _BY_OUTPUTS else "lora_A"
            inner = ["base_layer", *(f"{half}.{adapter}" for adapter in getattr(module, half))]
        elif hasattr(module, "original_module"):
            if not hasattr(module, "modules_to_save") or style not in _OF_COPIES:
                raise _not_sharded(name, style, kind)
            copies = (f"modules_to_save.{adapter}" for adapter in module.modules_to_save)
            inner = ["original_module", *copies]
        else:
            found[name] = style
            continue
        for part in (f"{name}.{inside}" for inside in inner):
            parameters = planned.get_submodule(part).named_parameters(recurse=False)
            found |= {f"{part}.{parameter}": style for parameter, _ in parameters}
            found[part] = style
    return found


def _not_sharded(name: str, style: str, kind: str) -> UsageError:
    return UsageError(
        f"tensor parallelism: the plan shards {name!r} ({style}), which has an adapter ({kind}) "
        "that cannot be sharded with it: use LoRA or rsLoRA on linear layers, "
        "leave it out of target_modules, or train without tensor parallelism"
    )


def _steps(
    planned: Any, plan: Plan, mesh: DeviceMesh, whole_experts: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Return the parameters and modules that the plans name, each with what shards it."""
    from transformers.distributed.tensor_parallel import (
        ALL_PARALLEL_STYLES,
        apply_tensor_parallelism,
    )

    experts: dict[str, str] = {}
    if whole_experts:
        experts = plan_of_experts(planned, mesh.size())
    inside = tuple(f"{name}." for name in experts)
    for name, style in plan.items():
        if style not in ALL_PARALLEL_STYLES:
            known = ", ".join(sorted(ALL_PARALLEL_STYLES))
            raise UsageError(
                f"tensor parallelism: {type(planned).__name__}'s plan has the style {style!r} for "
                f"{name!r}; transformers has {known}"
            )
        if not f"{name}.".startswith(inside):
            yield name, partial(apply_tensor_parallelism, planned, mesh, {name: style})
    for name, style in experts.items():
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        yield name, partial(apply_expert_parallelism, planned, mesh, mesh, {name: style})


def plan_of_experts(planned: Any, size: int) -> dict[str, str]:
    """Return transformers' plan for expert parallelism."""
    own = getattr(planned, "ep_plan", None)
    plan = planned._expand_parallel_plan(own) if own else {}
    if not plan:
        kind = type(planned).__name__
        raise UsageError(f"expert_parallel: {kind} has no ep_plan; delete the section")
    for name, style in plan.items():
        if style == "grouped_gemm":
            number = len(planned.get_parameter(name))
            require_divisor("expert_parallel", size, f"the experts of {name!r}", number)
    return plan


def check_heads(model: Any, size: int) -> None:
    """Raise UsageError unless `size` ranks can share the model's attention heads evenly."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("num_attention_heads", "num_key_value_heads"):
        if isinstance(heads := getattr(config, key, None), int):
            require_divisor("tensor parallelism", size, f"the model's {key}", heads)


@torch.no_grad()
def _take_back(param: nn.Parameter) -> None:
    """Turn a parameter that was sharded under `zero.Init` into an ordinary one, with all values on
    every rank.
    """
    # Of a tensor that wraps others, these have been sharded.
    for _, tensor in reachable(param):
        if (group := owning_group(tensor)) is None:
            continue
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device=group.comm.device)
        group.hand_over(tensor, values)
        show(tensor, values)
        set_owner(tensor, None)
    set_owner(param, None)


def _summed_over_ranks(model: nn.Module) -> Iterator[nn.Module]:
    """Return the modules whose weight gradients transformers sums over the ranks of the mesh."""
    planned, plan = _plan_of(model)
    modules = dict(planned.named_modules())
    for name, style in plan.items():
        if style == "replicated_with_grad_allreduce" and name in modules:
            yield modules[name]
