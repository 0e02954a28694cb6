"""`tensor_parallel.partition_config`: DeepSpeed's rules for dividing models that have no plan of
their own, as a plan for `zero.parallel.tensor`."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from zero.config.parallel import LayerSpec, PartitionConfig
from zero.errors import UsageError
from zero.parallel.tensor import Plan

_KEY = "tensor_parallel.partition_config"
# Attributes by which a model's code knows how many heads and channels it has. DeepSpeed divides
# them too, so that code written for it finds the numbers of this rank.
_SIZES = (
    "n_heads", "inner_dim", "num_heads", "num_kv", "num_attention_heads", "num_attn_heads",
    "all_head_size", "embed_dim", "hidden_size", "num_key_value_heads", "num_kv_heads",
    "kv_n_heads", "d_model", "num_attention_heads_per_partition",
    "num_multi_query_groups_per_partition", "hidden_size_per_partition",
)  # fmt: skip
# DeepSpeed divides the inputs of these itself.
_WITH_WHOLE_INPUTS = ("lm_head", "embed_out")


def plan_of(model: nn.Module, config: PartitionConfig, size: int) -> Plan:
    """transformers' style for each module and parameter that `config` divides over `size` ranks.

    Raises UsageError if no weight matches, and for a layer that cannot be divided so."""
    model_type = str(getattr(getattr(model, "config", None), "model_type", None)).lower()
    patterns = [
        (pattern, spec)
        for spec in config.layer_specs
        if not spec.model_types or model_type in map(str.lower, spec.model_types)
        for pattern in spec.patterns
    ]
    plan: dict[str, str] = {}
    matched = False
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        found = (spec for pattern, spec in patterns if re.match(pattern, f"{name}.weight"))
        if weight is None or (spec := next(found, None)) is None:
            continue
        matched = True
        if (style := _style(name, module, spec, size)) is not None:
            # the parameters before the module, as in transformers' own plans
            plan |= {f"{name}.{own}": style for own, _ in module.named_parameters(recurse=False)}
            plan[name] = style
    if not matched:
        weights = [name for name, _ in model.named_parameters() if name.endswith("weight")][:3]
        raise UsageError(
            f"{_KEY}.layer_specs: no pattern matches a weight of {type(model).__name__}, whose "
            f"first ones are {', '.join(weights)}"
        )
    return plan


def _style(name: str, module: Any, spec: LayerSpec, size: int) -> str | None:
    """None: the module's parameters stay as they are."""
    if spec.partition_type == "skip":
        return "replicated_with_grad_allreduce" if spec.grad_allreduce else None
    if module.weight.dim() != 2:
        return None
    if not isinstance(module, nn.Linear):
        raise UsageError(
            f"{_KEY}: {name!r} is of class {type(module).__name__}, and only torch.nn.Linear can "
            "be divided: put a spec with partition_type 'skip' before the one that matches it"
        )
    if spec.partition_dim not in (None, {"column": 0, "row": 1}[spec.partition_type]):
        raise UsageError(
            f"{_KEY}: partition_dim of {name!r} is {spec.partition_dim}; 'column' divides along 0, "
            "and 'row' along 1: delete it"
        )
    if spec.partition_type == "row":
        return "rowwise_split_input" if name in _WITH_WHOLE_INPUTS else "rowwise"
    packed = spec.packed or 1
    if packed == 1:
        return "colwise_gather_output" if spec.gather_output else "colwise"
    if module.out_features % (packed * size):
        raise UsageError(
            f"{_KEY}: {name!r} has {module.out_features} outputs, which {packed} matrices on "
            f"{size} ranks do not divide"
        )
    return _packed_style(packed)


def _packed_style(packed: int) -> str:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, PackedColwiseParallel

    class Packed(PackedColwiseParallel):
        """transformers' style, which divides a bias as if it were not packed."""

        def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
            whole = module._parameters[param]
            if whole is not None:
                placement = _StridedShard(0, split_factor=packed)
                part = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
                module._parameters[param] = nn.Parameter(part, whole.requires_grad)

    styles: Any = ALL_PARALLEL_STYLES
    name = f"packed_colwise_of_{packed}"
    if name not in styles:
        styles.register(name, Packed(split_factor=packed))
    return name


def divide_sizes(model: nn.Module, plan: Plan, size: int) -> None:
    """Divide the numbers of heads and channels that modules keep whose layers have been divided.

    transformers' own modules take them from their tensors. Raises UsageError for an odd number."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        styles = [plan.get(prefix + name, "") for name, _ in module.named_children()]
        divided = [style for style in styles if "colwise" in style and "gather" not in style]
        if not divided or type(module).__module__.startswith("transformers."):
            continue
        kept: dict[str, Any] = vars(module)
        for name in _SIZES:
            number = kept.get(name)
            if type(number) is not int:
                continue
            if number % size:
                raise UsageError(
                    f"{_KEY}: {prefix}{name} is {number}, which {size} ranks do not divide"
                )
            kept[name] = number // size
