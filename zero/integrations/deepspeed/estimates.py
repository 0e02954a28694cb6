"""How much memory a model's states take: `estimate_zero{2,3}_model_states_mem_needs`, with the
numbers of this engine.

The model trains in 16 bits by Adam. A parameter takes, in bytes:

    2 weight + 4 gradient + 4 master + 8 moments

All of it is sharded over the ranks; at stage 2 each device holds all weights. At stage 3 a device
also holds the weights and the gradient of the group in use. Without `Init`, the host of a node
builds the fp32 model once for each of its ranks. Activations, and the memory of torch itself, are
not included. Results are bytes. Those of a host are for a node, and are multiplied by
`additional_buffer_factor`. Nothing is measured here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import nn

from zero.core.layout import plan_groups

_WEIGHTS, _OPTIMIZER = 2, 4 + 4 + 8
_BUILT = 4


def _sizes(model: nn.Module) -> tuple[int, int]:
    """(elements of all parameters, elements of the largest group)."""
    groups = [
        sum(param.numel() for param in plan.params)
        for plan in plan_groups(model, persistence_threshold=0)
    ]
    return sum(groups), max(groups, default=0)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(bytes of a node's host, of a device, and of the largest group in use) at stage 3."""
    offloaded = (_OPTIMIZER if cpu_offload else 0) + (
        _WEIGHTS if cpu_offload and cpu_offload_params else 0
    )
    in_use = 2 * _WEIGHTS * largest_layer_params
    device = in_use + (_WEIGHTS + _OPTIMIZER - offloaded) * total_params // (
        num_gpus_per_node * num_nodes
    )
    built = (largest_layer_params if zero_init else total_params) * _BUILT * num_gpus_per_node
    host = max(offloaded * total_params // num_nodes, built)
    return int(host * additional_buffer_factor), device, in_use


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(bytes of a node's host, of a device) at stage 2."""
    offloaded = _OPTIMIZER if cpu_offload else 0
    device = _WEIGHTS * total_params + (_OPTIMIZER - offloaded) * total_params // (
        num_gpus_per_node * num_nodes
    )
    host = max(offloaded * total_params // num_nodes, total_params * _BUILT * num_gpus_per_node)
    return int(host * additional_buffer_factor), device


def _table(
    head: str, num_gpus_per_node: int, num_nodes: int, rows: Iterable[tuple[tuple, str]]
) -> None:
    print(
        f"Memory for parameters, gradients and optimizer states: {num_nodes} nodes of "
        f"{num_gpus_per_node} devices,"
    )
    print(f"model with {head}.\n  per CPU  |  per GPU |   Options")
    for (host, device, *_), options in rows:
        print(f" {host / 2**30:7.2f}GB | {device / 2**30:6.2f}GB | {options}")


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of stage 3 for each way of offloading, with and without `Init`."""
    rows = []
    for (optimizer, params), init in itertools.product(
        [(True, True), (True, False), (False, False)], [True, False]
    ):
        needs = (num_gpus_per_node, num_nodes, optimizer, params, init, additional_buffer_factor)
        options = f"{_place('param', params)}, {_place('optimizer', optimizer)}, zero_init={init:d}"
        rows.append(
            (
                estimate_zero3_model_states_mem_needs(total_params, largest_layer_params, *needs),
                options,
            )
        )
    head = (
        f"{total_params / 1e6:.1f}M parameters, {largest_layer_params / 1e6:.1f}M in the "
        "largest group"
    )
    _table(head, num_gpus_per_node, num_nodes, rows)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of stage 2 with and without an offloaded optimizer."""
    rows = []
    for offload in (True, False):
        needs = (num_gpus_per_node, num_nodes, offload, additional_buffer_factor)
        rows.append(
            (
                estimate_zero2_model_states_mem_needs(total_params, *needs),
                _place("optimizer", offload),
            )
        )
    _table(f"{total_params / 1e6:.1f}M parameters", num_gpus_per_node, num_nodes, rows)


def _place(what: str, offloaded: bool) -> str:
    return f"offload_{what}={'cpu ' if offloaded else 'none'}"


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, *args: int, **kwargs: float
) -> None:
    """`estimate_zero3_model_states_mem_needs_all_cold` of the sizes of `model`."""
    estimate_zero3_model_states_mem_needs_all_cold(*_sizes(model), *args, **kwargs)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, *args: int, **kwargs: float
) -> None:
    """`estimate_zero2_model_states_mem_needs_all_cold` of the size of `model`."""
    estimate_zero2_model_states_mem_needs_all_cold(_sizes(model)[0], *args, **kwargs)
