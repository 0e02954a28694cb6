"""DeepSpeed's names for tensor parallelism, and what `initialize` does for it.

`zero.parallel.tensor` does the work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero.comm import world
from zero.comm.communicator import Communicator, communicator
from zero.comm.mesh import Mesh, groups, mesh_of_accelerate, sizes_of
from zero.config import Config
from zero.config.keys import BATCH_KEYS
from zero.errors import UsageError
from zero.parallel import tensor as tensor_parallel

Replaced = dict[nn.Parameter, nn.Parameter]


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None = None,
    config: object = None,
    **_ignored: object,
) -> nn.Module:
    """Cut a transformers model over `tp_size` neighbouring ranks by its own plan, in place, and
    return it.

    Of `config`, the Trainer's dict, the section `expert_parallel` counts; `initialize` checks it.
    The engine, not `dtype`, gives the parameters their dtype. All ranks must call it."""
    world.init_distributed()
    experts = config.get("expert_parallel", {}) if isinstance(config, dict) else {}
    _cut(
        model,
        tp_size,
        None,
        experts.get("enabled") is True and experts.get("autoep_size") == tp_size,
    )
    return model


def _cut(model: nn.Module, size: int, mesh: Any, whole_experts: bool) -> Replaced:
    """Cut `model` over `size` neighbouring ranks, unless it is cut so already;

    `mesh`: has tp, or None.
    """
    found, replaced = tensor_parallel.mesh_in(model), {}
    if found is None and size > 1:
        comm = communicator()
        found = (
            tensor_parallel.make_mesh(size, comm.world_size, comm.device)
            if mesh is None
            else mesh["tp"]
        )
        replaced = tensor_parallel.parallelize(model, found, whole_experts)
    elif whole_experts and not any(
        getattr(module, "_is_expert_parallel", False) for module in model.modules()
    ):
        raise UsageError(
            "expert_parallel: the model is cut already, and each process has a part of each expert"
        )
    if found is not None:
        first = world.get_rank() // size * size
        if found.mesh.tolist() != list(range(first, first + size)):
            raise UsageError(
                f"tensor parallelism: the model is cut over the ranks {found.mesh.tolist()}, and "
                f"{size} neighbouring "
                "ranks are asked for, the first one a multiple of that"
            )
    return replaced


def share_model(
    model: nn.Module, settings: Config, mesh: Mesh | None
) -> tuple[Communicator, Replaced]:
    """The communicator of the ranks that have what this rank has of the model; new parameters by
    those they replace.

    `mesh`, or accelerate's, says which ranks share what; without one, `tensor_parallel.autotp_size`
    or the mesh of the model's DTensors does. A model that is to be cut and is not is cut by its
    plan. All ranks must call it."""
    job, autotp = communicator(), settings.tensor_parallel.autotp_size
    mesh = mesh_of_accelerate() if mesh is None else mesh
    if mesh is None:
        found = tensor_parallel.mesh_in(model)
        tp = autotp if autotp > 1 or found is None else found.size()
        if job.world_size % tp:
            raise UsageError(
                f"tensor parallelism: {tp} does not divide the number of ranks, {job.world_size}"
            )
        sizes = {"shard": job.world_size // tp, "tp": tp}
    else:
        sizes = sizes_of(mesh, job.world_size)
        if autotp not in (1, sizes.get("tp", 1)):
            raise UsageError(
                f"tensor_parallel.autotp_size is {autotp}, and the mesh is {sizes}: delete the key"
            )
        if "shard" in sizes:
            settings.zero_optimization.use_shard_size(sizes["shard"])
    tp, ep = sizes.get("tp", 1), settings.expert_parallel.size
    if ep not in (1, tp):
        raise UsageError(
            f"expert_parallel.autoep_size is {ep}, and {tp} processes share each layer: only these "
            "can share experts; "
            f"set tensor_parallel.autotp_size to {ep}, or delete the section: experts are sharded "
            "anyway, as all else"
        )
    replaced = _cut(model, tp, mesh, whole_experts=ep > 1)
    if (found := tensor_parallel.mesh_in(model)) is not None:
        sixteen_bit = settings.fp16.enabled or settings.bf16.enabled
        tensor_parallel.prepare(
            model, found, job.device, settings.compute_dtype if sixteen_bit else None
        )
    models = groups(sizes, of_data=False)
    if len(models[0]) == 1:
        return job, replaced
    if settings.sequence_parallel_size > 1:
        raise UsageError(
            f"sequence_parallel_size is {settings.sequence_parallel_size}, and the mesh {sizes}: "
            "give one"
        )
    comm = job.split(groups(sizes, of_data=True), models)
    _count_batches_once(settings, job.world_size, comm.world_size)
    return comm, replaced


def _count_batches_once(settings: Config, ranks: int, with_batches: int) -> None:
    """transformers and accelerate count a batch for each rank, also where several work on the same
    one.
    """
    train, micro, steps = (getattr(settings, key) for key in BATCH_KEYS)
    if None not in (train, micro, steps) and train == micro * steps * ranks:
        vars(settings)["train_batch_size"] = (
            micro * steps * with_batches
        )  # not an attribute: would count as given


def follow(optimizer: Any, params: Any, replaced: Replaced) -> tuple[Any, Any]:
    """An optimizer and parameters that were given before the model was cut: with the new
    parameters.

    accelerate wraps the optimizer if its `ParallelismConfig` has tensor parallelism. Here it is
    unwrapped."""
    if type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    for group in getattr(optimizer, "param_groups", ()):
        group["params"] = [replaced.get(param, param) for param in group["params"]]
    if params is not None:
        params = [
            each | {"params": [replaced.get(param, param) for param in each["params"]]}
            if isinstance(each, dict)
            else replaced.get(each, each)
            for each in params
        ]
    return optimizer, params
