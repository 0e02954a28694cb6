"""Pure arithmetic: which parameters form a group, where each one is in the group's flat buffer, and
which slice each rank has.

This file does not touch process groups or the values of tensors.

[Note: terms]
group        parameters that are unsharded, reduced and resharded as one: a transformer block, or
             one stray module.
full        a group's unsharded 1-D buffer. While the group is unsharded, its parameters are views
            of it.
shard       one rank's contiguous slice of `full`. All shards have the same length, so `full` is
            padded.
slot        a parameter's place in `full`.
persistent  a parameter that is small enough to stay unsharded all the time.
master      the fp32 copy of a shard that the optimizer updates.
sub-group   a piece of a master that the optimizer updates at a time.

    full   | slot 0 | gap | slot 1           | gap | slot 2 | padding |
    shards | rank 0             | rank 1             | rank 2         |
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from torch import nn

from zero.core.quantized_weights import LEAST_BYTES, is_quantized, quantized_tensors
from zero.core.sharded_param import holders_of, local
from zero.offload.pinned import round_up

# Slots start on multiples of this many elements: 64 bytes of a 16-bit dtype. Matrix kernels and the
# vectorised part of the optimizer then see the alignment that separately allocated parameters would
# have.
ALIGNMENT = 32


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its group's flat buffer; all numbers are elements."""

    offset: int
    numel: int
    shape: torch.Size

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of the slot number `slot` that lies in a shard; all numbers are elements.

    `shard[start : start + numel]` holds `param.flatten()[inside : inside + numel]`.
    """

    slot: int
    start: int
    inside: int
    numel: int


class GroupLayout:
    """Where each of a group's parameters lies in `full`, and how `full` is split into shards.

    `numel` is the number of elements in the parameters, `padded` in `full`, and `shard_numel` in
    each rank's shard. Every shard of a `replicated` group is all of `full`. A single parameter is
    split without regard to alignment, because scripts expect shards of ceil(elements / ranks)."""

    def __init__(self, shapes: Sequence[torch.Size], world_size: int, replicated: bool = False):
        self.world_size = world_size
        self.replicated = replicated
        slots, offset = [], 0
        for shape in shapes:
            slots.append(Slot(offset, shape.numel(), shape))
            offset = round_up(offset + shape.numel(), ALIGNMENT)
        self.slots = tuple(slots)
        self.numel = sum(slot.numel for slot in slots)
        self.padded = round_up(self.numel, world_size)
        if len(shapes) > 1:
            self.padded = round_up(offset, ALIGNMENT * world_size)
        self.shard_numel = self.padded if replicated else self.padded // world_size

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """The (start, end) ranges of `full` that belong to no parameter."""
        ends = [0, *(slot.end for slot in self.slots)]
        starts = [*(slot.offset for slot in self.slots), self.padded]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]

    def shard_range(self, rank: int) -> tuple[int, int]:
        """The (start, end) of `rank`'s shard in `full`."""
        start = 0 if self.replicated else rank * self.shard_numel
        return start, start + self.shard_numel

    def pieces(self, rank: int) -> list[Piece]:
        """What `rank`'s shard holds, in the order of its elements."""
        low, high = self.shard_range(rank)
        found = []
        for index, slot in enumerate(self.slots):
            start, end = max(slot.offset, low), min(slot.end, high)
            if start < end:
                found.append(Piece(index, start - low, start - slot.offset, end - start))
        return found


@dataclass
class GroupPlan:
    """Which parameters form a group, and the modules whose forward needs them.

    `shared` marks a group whose parameters several modules own (tied weights). It is unsharded for
    each owner's call. `packed` marks a group of quantized tensors, which are moved as bytes, and of
    which not all are an `nn.Parameter`; `aliases` are other objects for the same bytes, by the
    tensor in `params`. `in_fp32` marks parameters that stay in fp32 in 16-bit training."""

    name: str
    params: list[nn.Parameter] = field(default_factory=list)
    param_names: list[str] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    persistent: bool = False
    shared: bool = False
    packed: bool = False
    in_fp32: bool = False
    aliases: dict[torch.Tensor, list[torch.Tensor]] = field(default_factory=dict)


# Attributes of modules that the functions of `zero.integrations.deepspeed.leaf` set. The first has
# DeepSpeed's name, because scripts set it too.
LEAF_FLAG = "_z3_leaf"
EXTERNAL_PARAMETERS = "_zero_external_parameters"
# Of a model that `zero.parallel.pipeline` has split, and that lacks what other ranks have.
PIPELINE_PLACE = "_zero_pipeline"


def packs_experts(module: nn.Module) -> bool:
    """Whether the module holds the weights of all its experts in tensors whose first dimension is
    the expert.
    """
    experts = getattr(module, "num_experts", None)
    # Under expert parallelism the module's number is this rank's, and the parameters are DTensors.
    own = (getattr(param, "_local_tensor", param) for param in module.parameters(recurse=False))
    return isinstance(experts, int) and any(p.dim() == 3 and len(p) == experts for p in own)


def find_blocks(model: nn.Module) -> dict[nn.Module, str]:
    """The outermost modules to gather as a whole: leaves, and the modules that the model names, or
    else the children of `ModuleList`s.
    """
    declared = (getattr(module, "_no_split_modules", None) or () for module in model.modules())
    classes, blocks = set().union(*declared), {}  # of HF models

    def visit(module: nn.Module, name: str, in_list: bool) -> None:
        is_one = type(module).__name__ in classes if classes else in_list
        if getattr(module, LEAF_FLAG, False) or (name and is_one):
            blocks[module] = name
            return
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}".lstrip("."), isinstance(module, nn.ModuleList))

    visit(model, "", False)
    return blocks


def _called(block: nn.Module) -> list[nn.Module]:
    """The modules whose calls use a block: the block itself, or its children if it is a container
    without a forward.
    """
    if type(block).forward is nn.Module.forward:
        return [called for child in block.children() for called in _called(child)]
    return [block]


def called_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules whose calls use the blocks of `model`."""
    return [called for block in find_blocks(model) for called in _called(block)]


def _prompt_encoders(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of PEFT's prompt encoders. To save a prompt, PEFT calls them on rank 0 alone,
    where a gather would wait for the other ranks.
    """
    found = (getattr(module, "prompt_encoder", None) for module in model.modules())
    encoders = [each for each in found if isinstance(each, nn.Module)]
    return {param for encoder in encoders for param in encoder.parameters()}


def _wrappers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """The modules whose parameters PEFT adapts by `target_parameters`, and the wrapper that is
    called in their place: it reads the parameter before it calls them. Wrappers nest.
    """
    found: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module) and hasattr(module, "parameter_name"):
            found[base] = found.get(module, module)
    return found


def _owners(
    model: nn.Module, buffers: bool | None
) -> tuple[
    dict[nn.Parameter, list[nn.Module]],
    dict[nn.Parameter, str],
    dict[torch.Tensor, list[torch.Tensor]],
]:
    """Everything that is sharded: {what: the modules that own it}, its names, and for what is moved
    as bytes, also other tensors over the same bytes.
    """
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    names: dict[nn.Parameter, str] = {}
    aliases: dict[torch.Tensor, list[torch.Tensor]] = {}
    for module_name, module in model.named_modules():
        packed = quantized_tensors(module, buffers)
        aliases |= {each.tensor: each.aliases for each in packed}
        own = [(each.name, cast(nn.Parameter, each.tensor)) for each in packed]
        for name, param in module.named_parameters(recurse=False):
            if param not in aliases and param.is_floating_point() and not is_quantized(param):
                own.append((name, param))
        for name, param in own:
            owners.setdefault(param, []).append(module)
            names.setdefault(param, f"{module_name}.{name}" if module_name else name)
    for module in model.modules():
        for param in module.__dict__.get(EXTERNAL_PARAMETERS, ()):
            if param in owners and module not in owners[param]:
                owners[param].append(module)
    return owners, names, aliases


def plan_groups(
    model: nn.Module,
    persistence_threshold: int,
    model_persistence_threshold: int = sys.maxsize,
    sort_key: Mapping[nn.Parameter, int] | None = None,
    packed_too: bool = True,
    buffers: bool | None = False,
    in_fp32: Collection[nn.Parameter] = (),
) -> list[GroupPlan]:
    """Assign every floating-point parameter of `model` to exactly one group, and the tensors of
    quantized layers and large `buffers` (see `quantized_tensors`); those only if `packed_too`.

    A group is uniform in dtype, in `requires_grad`, in whether its parameters are `in_fp32`, and in
    which ranks hold them; one of quantized tensors has any dtypes. Parameters without elements are
    in none. Parameters of at most `persistence_threshold` elements go to the persistent groups, up
    to `model_persistence_threshold` elements in total, as do PEFT's prompts of any size. Quantized
    tensors do so only if they are tiny, because the all-gather of their layer's codes can carry
    them. Others go to the group of the block that contains all of their owners, or otherwise to a
    stray group of the modules that own them. Experts that are packed into 3-D parameters may be
    most of the model, so they are a stray group even inside a block, unless it is a leaf. Within a
    group, parameters with equal `sort_key` (the index of the optimizer's param group) lie next to
    each other."""
    blocks = find_blocks(model)
    leaves = (module for module in model.modules() if getattr(module, LEAF_FLAG, False))
    in_leaves = {module for leaf in leaves for module in leaf.modules()}
    block_of: dict[nn.Module, nn.Module] = {}
    for block in blocks:
        for module in block.modules():
            if module in in_leaves or not packs_experts(module):
                block_of.setdefault(module, block)

    wrappers = _wrappers(model)
    owners, names, aliases = _owners(model, buffers)
    plans: dict[Hashable, GroupPlan] = {}
    persistent, prompts = 0, _prompt_encoders(model)
    for param, owned_by in owners.items():
        is_packed = param in aliases
        if param.numel() == 0 or (is_packed and not packed_too):
            continue
        is_wide = param in in_fp32
        traits = (param.dtype, param.requires_grad, is_wide, holders_of(param))
        traits = ("packed", holders_of(param)) if is_packed else traits
        homes = {block_of.get(module) for module in owned_by}
        home = next(iter(homes)) if len(homes) == 1 else None
        if param in prompts or (
            param.numel() <= persistence_threshold
            and persistent + param.numel() <= model_persistence_threshold
            and not (is_packed and local(param).nbytes >= LEAST_BYTES)
        ):
            persistent += param.numel()
            key, plan = ("persistent", traits), GroupPlan("persistent", persistent=True)
        elif home is not None:
            key = (home, traits)
            plan = GroupPlan(blocks[home] or "the whole model", modules=_called(home))
        else:
            called = [wrappers.get(module, module) for module in owned_by]
            key = (tuple(owned_by), traits)
            plan = GroupPlan(names[param], modules=called, shared=len(called) > 1)
        plan = plans.setdefault(key, plan)
        plan.params.append(param)
        plan.in_fp32 = is_wide
        if is_packed:
            plan.packed = True
            plan.aliases[param] = aliases[param]

    for plan in plans.values():
        if sort_key is not None:
            plan.params.sort(key=lambda p: sort_key.get(p, -1))
        plan.param_names = [names[param] for param in plan.params]
    return list(plans.values())
