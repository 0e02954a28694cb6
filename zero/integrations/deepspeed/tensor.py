"""DeepSpeed's name for tensor parallelism, and what `initialize` does for it.

`zero.parallel.tensor` does the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero.comm import world
from zero.comm.communicator import Communicator, communicator
from zero.comm.world import groups, mesh_of_accelerate, sizes_of
from zero.config import Config, load_config
from zero.errors import UsageError, require_divisor
from zero.integrations.deepspeed.distributed import set_parallel_sizes
from zero.parallel import experts
from zero.parallel import tensor as tensor_parallel

Replaced = dict[nn.Parameter, nn.Parameter]


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None = None,
    config: Any = None,
) -> nn.Module:
    """Shard a model over `tp_size` neighbouring ranks by its own plan, in place, and return it.

    `config` is the configuration, as the Trainer passes it. The engine, not `dtype`, gives the
    parameters their dtype. All ranks must call it."""
    world.init_distributed()
    settings = load_config({} if config is None else config, allow_auto=True)
    whole_experts = settings.expert_parallel.size == tp_size > 1
    _parallelize(model, tp_size, None, whole_experts)
    set_parallel_sizes(1, tp_size, communicator().device)
    return model


def _parallelize(
    model: nn.Module, size: int, mesh: Any, whole_experts: bool
) -> tuple[Any, Replaced]:
    """Shard `model` over `size` neighbouring ranks, unless it has DTensors already.

    Returns the mesh of its DTensors (None: it has none), and new parameters by those that they
    replace. `mesh` has the dimension "tp"; None: one is made."""
    found, replaced = tensor_parallel.mesh_in(model), {}
    if found is None and size > 1:
        comm = communicator()
        if mesh is None:
            found = tensor_parallel.make_mesh(size, comm.world_size, comm.device)
        else:
            found = mesh["tp"]
        replaced = tensor_parallel.parallelize(model, found, whole_experts)
    elif whole_experts and not any(
        getattr(module, "_is_expert_parallel", False) for module in model.modules()
    ):
        message = "the model is already sharded, and each process has a part of each expert"
        raise UsageError(f"expert_parallel: {message}")
    first = world.get_rank() // size * size
    if found is not None and found.mesh.tolist() != list(range(first, first + size)):
        raise UsageError(
            f"tensor parallelism: the model is sharded over the ranks {found.mesh.tolist()}, but "
            f"it needs {size} neighbouring ranks, the first of which is a multiple of {size}"
        )
    return found, replaced


def share_model(
    model: nn.Module, settings: Config, mesh: DeviceMesh | None, ranks_of_sample: int = 1
) -> tuple[Communicator, Replaced, Config]:
    """The communicator of the ranks that have what this rank has of the model, new parameters by
    those they replace, and the settings as the mesh completes them.

    `mesh`, or accelerate's, says which ranks share what; without one, `tensor_parallel.autotp_size`
    or the mesh of the model's DTensors does. A model that is to be sharded and is not is sharded by
    its plan. `ranks_of_sample` neighbours read the same samples. All ranks must call it."""
    job = communicator()
    mesh = mesh_of_accelerate() if mesh is None else mesh
    sizes = _sizes(model, settings, mesh, job.world_size)
    if mesh is not None and "shard" in sizes:
        settings = settings.with_shard_size(sizes["shard"])
    tp, ep = sizes.get("tp", 1), settings.expert_parallel.size
    if ep > 1 and math.prod(sizes.values()) == sizes.get("shard"):
        experts.refuse_others(settings, job.world_size)
        set_parallel_sizes(1, 1, job.device)
        replaced = experts.divide(model, ep, job, settings.sixteen_bit_dtype)
        return job, replaced, settings
    if ep not in (1, tp):
        raise UsageError(
            f"expert_parallel.autoep_size is {ep}, and the mesh is {sizes}: processes that share "
            f"layers can share all experts; set tensor_parallel.autotp_size to {ep}, or delete it"
        )
    found, replaced = _parallelize(model, tp, mesh, ep > 1)
    if found is not None:
        tensor_parallel.prepare(model, found, job.device, settings.sixteen_bit_dtype)
    models = groups(sizes, of_data=False)
    set_parallel_sizes(sizes.get("pp", 1), tp, job.device, ranks_of_sample)
    if len(models[0]) == 1:
        return job, replaced, settings
    if settings.sequence_parallel_size > 1:
        size = settings.sequence_parallel_size
        raise UsageError(f"sequence_parallel_size is {size}, and the mesh {sizes}: give one")
    comm = job.split(groups(sizes, of_data=True), models)
    # transformers and accelerate count a batch for each rank, also where several work on the same
    # one.
    train, steps = settings.train_batch_size, settings.gradient_accumulation_steps
    micro = settings.train_micro_batch_size_per_gpu
    if train and micro and steps and train == micro * steps * job.world_size:
        train = micro * steps * comm.world_size
        settings = settings.model_copy(update={"train_batch_size": train})
    return comm, replaced, settings


def _sizes(
    model: nn.Module, settings: Config, mesh: DeviceMesh | None, ranks: int
) -> dict[str, int]:
    """The size of each dimension of `zero.comm.world`."""
    autotp = settings.tensor_parallel.autotp_size
    if (size := experts.size_of(model)) > settings.expert_parallel.size:
        raise UsageError(f"the model's experts are divided over {size} ranks: set {experts.KEY}")
    if mesh is None:
        found = None if size > 1 else tensor_parallel.mesh_in(model)
        tp = autotp if autotp > 1 or found is None else found.size()
        require_divisor("tensor parallelism", tp, "the number of ranks", ranks)
        return {"shard": ranks // tp, "tp": tp}
    sizes = sizes_of(mesh, ranks)
    if autotp not in (1, sizes.get("tp", 1)):
        message = f"is {autotp}, and the mesh is {sizes}: delete the key"
        raise UsageError(f"tensor_parallel.autotp_size {message}")
    return sizes


def with_new_parameters(optimizer: Any, params: Any, replaced: Replaced) -> tuple[Any, Any]:
    """An optimizer and parameters that were given before the model was sharded, with the new
    parameters.

    accelerate wraps the optimizer if its `ParallelismConfig` has tensor parallelism. Here it is
    unwrapped."""

    def renewed(given: Iterable[Any]) -> list[Any]:
        return [
            each | {"params": renewed(each["params"])}
            if isinstance(each, dict)
            else replaced.get(each, each)
            for each in given
        ]

    if type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    for group in getattr(optimizer, "param_groups", ()):
        group["params"] = renewed(group["params"])
    return optimizer, renewed(params) if params is not None and replaced else params
