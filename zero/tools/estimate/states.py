"""What a rank keeps of one group between its uses, and where: rules for `zero estimate`, without a
model's forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from zero.config import Config, ZeroConfig
from zero.core.layout import GroupLayout, GroupPlan, plan_groups
from zero.integrations.deepspeed.optimizers import build_optimizer
from zero.offload.tiers import LEAST_BYTES_IN_A_FILE
from zero.optim.adam8bit import nbytes as coded_bytes
from zero.optim.muon import is_hidden_matrix

DEVICE, HOST, DISK = "device", "host", "disk"


class Home(NamedTuple):
    """Where the weights of a group live between their uses, and what the optimizer keeps of it."""

    weights: str
    optimizer: str


class Kept(NamedTuple):
    """One group on one rank.

    Attributes: gradient, master, state: bytes of the shard's gradient that is kept for the step, of
    its masters and of the optimizer's state; 0 for a frozen group. shares_weights: the offloaded
    master is the weights' shard itself."""

    plan: GroupPlan
    layout: GroupLayout
    home: Home
    gradient: int
    master: int
    state: float
    shares_weights: bool

    @property
    def trainable(self) -> bool:
        return self.plan.params[0].requires_grad

    @property
    def offloaded(self) -> bool:
        """Whether gradient, masters and state are not on the device."""
        return self.home.optimizer != DEVICE

    def place(self, nbytes: float) -> str:
        """Where a gradient or a master of this size is."""
        return place("nvme", nbytes) if self.home.optimizer == DISK else self.home.optimizer


def updates_whole_tensors(config: Config) -> bool:
    """As `zero.build.updates_elements`: of the types that the section `optimizer` has, only Muon
    does.
    """
    told = config.zero_optimization.elementwise_optimizer
    return (
        not told
        if told is not None
        else config.optimizer is not None and config.optimizer.type == "Muon"
    )


def param_groups(model: nn.Module, config: Config) -> dict[nn.Parameter, int]:
    """The param group of each trained parameter: Muon's section has two groups, all others one."""
    is_muon = config.optimizer is not None and config.optimizer.type == "Muon"
    named = [(param, name) for name, param in model.named_parameters() if param.requires_grad]
    return {param: int(is_muon and not is_hidden_matrix(param, name)) for param, name in named}


def keep(model: nn.Module, config: Config, world_size: int) -> list[Kept]:
    """What a rank keeps of each group, as `zero.build.make_units` makes them."""
    zero = config.zero_optimization
    threshold = zero.stage3_param_persistence_threshold if zero.stage == 3 else 0
    plans = plan_groups(
        model, threshold, zero.stage3_model_persistence_threshold, param_groups(model, config)
    )
    ranks = zero.shards_over(world_size)
    layouts = [
        GroupLayout([param.shape for param in plan.params], ranks, zero.stage == 0)
        for plan in plans
    ]
    triples, moments = (
        zip(plans, layouts, homes(plans, layouts, config), strict=True),
        moment_count(config),
    )
    return [_kept(config, moments, plan, layout, home) for plan, layout, home in triples]


def _kept(config: Config, moments: int, plan: GroupPlan, layout: GroupLayout, home: Home) -> Kept:
    zero, item, shard = config.zero_optimization, config.compute_dtype.itemsize, layout.shard_numel
    if not plan.params[0].requires_grad:
        return Kept(plan, layout, home, 0, 0, 0, False)
    master = master_bytes(config)
    moment = 2 if config.bf16.without_masters and config.bf16.bf16_optimizer_states else 4
    state = coded_bytes(shard) if zero.zero_quantized_moments else shard * moment
    if config.optimizer is not None and config.optimizer.type == "Muon":  # AdamW has a second one
        named = zip(plan.params, plan.param_names, strict=True)
        moments -= sum(p.numel() for p, name in named if is_hidden_matrix(p, name)) / layout.numel
    gradient = shard * config.gradient_bytes(sums_have_16_bits=True)
    shares = item == master and _is_own_master(zero, *home)
    return Kept(plan, layout, home, gradient, shard * master, state * moments, shares)


def master_bytes(config: Config) -> int:
    """Bytes of an element of the masters."""
    return 2 if config.bf16.without_masters else 4


def homes(
    plans: Sequence[GroupPlan], layouts: Sequence[GroupLayout], config: Config
) -> Iterator[Home]:
    """The home of each group. Of weights for files, the first `max_in_cpu` elements of a rank stay
    in host memory.

    With a `ratio`, the first groups that fit stay on the device, as `zero.optim.placement` decides.
    """
    zero, item, master = (
        config.zero_optimization,
        config.compute_dtype.itemsize,
        master_bytes(config),
    )
    in_memory = (
        zero.offload_param.max_in_cpu
        if zero.offloads_params and zero.offload_param.device == "nvme"
        else 0
    )
    trained = [plan.params[0].requires_grad for plan in plans]
    ratio = zero.offload_optimizer.ratio if zero.offloads_optimizer and zero.stage else 0.0
    stays = sum(
        layout.shard_numel for layout, trains in zip(layouts, trained, strict=True) if trains
    )
    stays = 0 if ratio == "auto" else (1 - ratio) * stays
    for plan, layout, trains in zip(plans, layouts, trained, strict=True):
        in_memory -= layout.numel // layout.world_size
        weights = optimizer = DEVICE
        if zero.offloads_params and zero.stage == 3 and not plan.persistent:
            weights = place(zero.offload_param.device, layout.shard_numel * item)
            weights = HOST if in_memory >= 0 else weights
        if trains and layout.shard_numel <= stays:
            stays -= layout.shard_numel
        elif trains:
            optimizer = place(zero.offload_optimizer.device, layout.shard_numel * master)
        yield Home(weights, optimizer)


def place(device: str, nbytes: float) -> str:
    """Where a tensor of this size is offloaded to: small ones stay in host memory."""
    return DISK if device == "nvme" and nbytes >= LEAST_BYTES_IN_A_FILE else HOST


def _is_own_master(zero: ZeroConfig, home: str, place: str) -> bool:
    """Whether a shard at `home`, in the masters' dtype, is the master at `place`; see
    `OptimizerShard.make_master`.
    """
    if home == DISK:
        return place == DISK and zero.offload_param.nvme_path == zero.offload_optimizer.nvme_path
    return home == place or (home, place) == (HOST, DISK)


def moment_count(config: Config) -> int:
    """Values of the optimizer's state for each parameter element; 2 for Muon, whose matrices have
    one.

    Without a section: AdamW, the Trainer's own.
    """
    if config.optimizer is None or config.optimizer.type == "Muon":
        return 2
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    optimizer = build_optimizer(config, None, [param], nn.Module())
    optimizer.step()
    return sum(
        value.dim() for value in optimizer.state[param].values() if isinstance(value, torch.Tensor)
    )
