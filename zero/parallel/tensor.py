"""Tensor parallelism: models whose parameters are `DTensor`s, each rank of a model group having a
part of each layer.

torch and transformers cut the layers and add up what the parts compute. This file gets such a model
ready for an engine, which sees the local parts alone, and cuts an ordinary model by its own plan.
Only `zero.integrations.deepspeed` uses it: the engine knows the attributes that `prepare` sets (see
`zero.core.sharded_param.Cut`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from zero.core.param_group import owning_group
from zero.core.sharded_param import owner_of, set_owner, show
from zero.errors import UsageError


class DTensorCut:
    """How the parameter `param` is cut over its mesh: see `zero.core.sharded_param.Cut`."""

    def __init__(self, param: DTensor):
        self._mesh = param.device_mesh
        self._placements = param.placements
        self._whole = {"shape": param.shape, "stride": param.stride()}
        (placement,), self.index = param.placements, self._mesh.get_local_rank()
        self.described = [
            placement.dim % param.dim(),
            getattr(placement, "split_factor", 1),
            self._mesh.size(),
        ]

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The whole from every rank's part. All ranks of the mesh must call it."""
        return DTensor.from_local(
            part, self._mesh, self._placements, run_check=False, **self._whole
        ).full_tensor()

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole."""
        return distribute_tensor(whole, self._mesh, self._placements, src_data_rank=None).to_local()


def mesh_in(model: nn.Module) -> DeviceMesh | None:
    """The mesh of the model's DTensors, None if it has none.

    Raises UsageError for several dimensions, for several sets of ranks, and for a model that
    `fully_shard` has wrapped."""
    if wrapped := next(
        (module for module in model.modules() if isinstance(module, FSDPModule)), None
    ):
        raise UsageError(
            f"fully_shard has sharded {type(wrapped).__name__}: leave that to ZeRO (without "
            "fsdp_size)"
        )
    found = {
        param.device_mesh: name
        for name, param in model.named_parameters()
        if isinstance(param, DTensor)
    }
    ranks = {
        tuple(mesh.mesh.flatten().tolist()) for mesh in found
    }  # transformers makes one more mesh for experts
    for mesh, name in found.items():
        if mesh.ndim > 1 or len(ranks) > 1:
            raise UsageError(
                f"parameter {name!r} is a DTensor of {mesh}: cut the model over one mesh of one "
                "dimension, such as "
                "mesh['tp']; ZeRO shards over the other ranks"
            )
    return next(iter(found), None)


@torch.no_grad()
def prepare(
    model: nn.Module, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype | None
) -> None:
    """Get a model with DTensors of `mesh` ready for an engine that computes in `dtype` (None: as
    they are).

    Ordinary parameters and buffers get the values of the mesh's first rank. All ranks must call it.
    """
    if mesh.device_type != device.type:
        raise UsageError(
            f"the model's DTensors are on a mesh of {mesh.device_type}, and the engine computes on "
            f"{device}"
        )
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            _prepare_dtensor(name, param, device, dtype)
            param._zero_is_copy = param.placements == (Replicate(),) and mesh.get_local_rank() > 0
        else:
            param._zero_is_copy = mesh.get_local_rank() > 0
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor) and owning_group(tensor) is None and tensor.numel():
            of_first = distribute_tensor(tensor.detach().to(device), mesh, [Replicate()])
            tensor.copy_(of_first.to_local())
    for module in _summed_over_ranks(model):
        # transformers sums these gradients in a hook that it adds in the first forward. It must be
        # there before the engine's, which takes the gradient away.
        with torch.enable_grad():
            module(
                torch.zeros(
                    1, *module.weight.shape, dtype=module.weight.dtype, device=module.weight.device
                )
            )


def _prepare_dtensor(
    name: str, param: nn.Parameter, device: torch.device, dtype: torch.dtype | None
) -> None:
    (placement,) = param.placements
    if not isinstance(placement, Replicate) and not hasattr(placement, "dim"):
        raise UsageError(
            f"parameter {name!r} is a DTensor with the placement {placement}: it must be Shard or "
            "Replicate"
        )
    if owner_of(param) is not None:
        return  # by an earlier engine, for which it was prepared
    if (
        dtype is not None
        and param.is_floating_point()
        and (param.dtype, param.device) != (dtype, device)
    ):
        # A DTensor's dtype cannot change. The object stays: optimizers have it.
        torch.utils.swap_tensors(
            param, nn.Parameter(param.detach().to(device, dtype), param.requires_grad)
        )
    if not isinstance(placement, Replicate):
        param._zero_cut = DTensorCut(param)
    if param.requires_grad:
        param.register_post_accumulate_grad_hook(partial(_cut_gradient, param.placements))


def _cut_gradient(placements: tuple, param: nn.Parameter) -> None:
    """Give the gradient the parameter's placement: a sum over ranks may be outstanding, or it may
    not be cut yet.
    """
    if param.grad is not None and param.grad.placements != placements:
        param.grad = param.grad.redistribute(placements=placements)


# -- cutting an ordinary model


def make_mesh(size: int, world_size: int, device: torch.device) -> DeviceMesh:
    """The mesh of `size` neighbouring ranks that this rank is in. All ranks must call it."""
    if size < 1 or world_size % size:
        raise UsageError(
            f"tensor_parallel.autotp_size: {size} does not divide the number of ranks, {world_size}"
        )
    mesh = torch.arange(world_size, device="cpu").view(-1, size)
    return DeviceMesh(device.type, mesh, mesh_dim_names=("dp", "tp"))["tp"]


@torch.no_grad()
def parallelize(
    model: nn.Module, mesh: DeviceMesh, whole_experts: bool
) -> dict[nn.Parameter, nn.Parameter]:
    """Cut a transformers model over `mesh` by its own plan. Returns the new parameters, by those
    that they replace.

    whole_experts: a rank gets some of the experts, and tokens travel to them (expert parallelism).
    Otherwise it gets a part of each. Raises UsageError for a model without a plan, and where the
    mesh does not divide its heads or experts. All ranks must call it."""
    planned = next((module for module in model.modules() if getattr(module, "tp_plan", None)), None)
    if planned is None:
        raise UsageError(
            f"{type(model).__name__} has no tp_plan: call "
            "torch.distributed.tensor.parallel.parallelize_module on it "
            "first, with a mesh of one dimension"
        )
    if adapter := next(
        (name for name, module in planned.named_modules() if hasattr(module, "base_layer")), None
    ):
        raise UsageError(
            f"tensor parallelism: {adapter!r} has an adapter, which no plan cuts: train without "
            "adapters"
        )
    check_heads(planned, mesh.size())
    found: dict[nn.Parameter, nn.Parameter] = {}
    before = dict(planned.named_parameters(remove_duplicate=False))
    for name, cut in _cuts(planned, mesh, whole_experts):
        if (old := before.get(name)) is None:
            cut()
            continue
        path, _, attribute = name.rpartition(".")
        module = planned.get_submodule(path)
        if old not in found:  # it may be tied to one that is cut already
            _take_back(old)
            cut()
            found[old] = new = module._parameters[attribute]
            if isinstance(new, DTensor):
                new._local_tensor = (
                    new._local_tensor.clone()
                )  # else it would keep the memory of the whole
        module._parameters[attribute] = found[old]
    return found


def _cuts(
    planned: nn.Module, mesh: DeviceMesh, whole_experts: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The parameters and modules that the plans name, each with what cuts it."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    of_experts = {}
    if whole_experts:
        apply_to_experts, of_experts = _plan_of_experts(planned, mesh.size())
    inside = tuple(f"{name}." for name in of_experts)
    for name, style in planned._expand_parallel_plan(planned.tp_plan).items():
        if not f"{name}.".startswith(inside):
            yield name, partial(apply_tensor_parallelism, planned, mesh, {name: style})
    for name, style in of_experts.items():
        yield name, partial(apply_to_experts, planned, mesh, mesh, {name: style})


def _plan_of_experts(planned: nn.Module, size: int) -> tuple[Callable, dict[str, str]]:
    """What applies transformers' plan for expert parallelism to a model, and that plan."""
    try:
        from transformers.distributed.expert_parallel import apply_expert_parallelism
    except ImportError:
        raise UsageError("expert_parallel: needs transformers 5.22 or newer") from None
    plan = planned._expand_parallel_plan(planned.ep_plan or {})
    if not plan:
        raise UsageError(
            f"expert_parallel: {type(planned).__name__} has no ep_plan; delete the section"
        )
    for name, style in plan.items():
        if style == "grouped_gemm" and (experts := len(planned.get_parameter(name))) % size:
            raise UsageError(
                f"expert_parallel: {size} ranks do not divide the {experts} experts of {name!r}"
            )
    return apply_expert_parallelism, plan


def check_heads(model: nn.Module, size: int) -> None:
    """Raise UsageError unless `size` ranks can share the model's attention heads evenly."""
    config = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % size:
            raise UsageError(
                f"tensor parallelism: {size} ranks do not divide the model's {key}, {heads}"
            )


@torch.no_grad()
def _take_back(param: nn.Parameter) -> None:
    """Make a parameter that was sharded under `zero.Init` an ordinary one, with all values on every
    rank.
    """
    if (group := owning_group(param)) is None:
        return
    values = torch.empty(param.numel(), dtype=param.dtype, device=group.comm.device)
    group.hand_over(param, values)
    show(param, values.view(param.shape))
    set_owner(param, None)


def _summed_over_ranks(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose weights' gradients transformers sums over the ranks of the mesh."""
    planned = next((module for module in model.modules() if getattr(module, "tp_plan", None)), None)
    if planned is not None:
        modules = dict(planned.named_modules())
        for name, style in planned._expand_parallel_plan(planned.tp_plan).items():
            if style == "replicated_with_grad_allreduce" and name in modules:
                yield modules[name]
