"""What a rank keeps of one unit between its uses, and where: rules for `zero estimate`, without a model's forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from zero.config import Config, ZeroConfig
from zero.deepspeed.optimizers import build_optimizer
from zero.layout import UnitLayout, UnitPlan, plan_units
from zero.offload.tiers import LEAST_BYTES_IN_A_FILE
from zero.optim.moments import nbytes as coded_bytes
from zero.optim.muon import is_hidden_matrix

DEVICE, HOST, DISK = "device", "host", "disk"


class Home(NamedTuple):
    """Where the weights of a unit live between their uses, and what the optimizer keeps of it."""

    weights: str
    optimizer: str


class Kept(NamedTuple):
    """One unit on one rank.

    Attributes: gradient: bytes of an element that is kept for the step. master, state: bytes of the shard's masters and
    of the optimizer's state; 0 for a frozen unit. offloaded: the part of gradient, masters and state that is not on the
    device. shares_weights: the offloaded master is the weights' shard itself.
    """

    plan: UnitPlan
    layout: UnitLayout
    home: Home
    gradient: int
    master: int
    state: float
    offloaded: float
    shares_weights: bool

    @property
    def trainable(self) -> bool:
        return self.plan.params[0].requires_grad


def param_groups(model: nn.Module, config: Config) -> dict[nn.Parameter, int]:
    """The param group of each trained parameter: Muon's section has two groups, all others one."""
    is_muon = config.optimizer is not None and config.optimizer.type == "Muon"
    named = [(param, name) for name, param in model.named_parameters() if param.requires_grad]
    return {param: int(is_muon and not is_hidden_matrix(param, name)) for param, name in named}


def keep(model: nn.Module, config: Config, world_size: int) -> list[Kept]:
    """What a rank keeps of each unit, as `zero.construction.make_units` makes them."""
    zero = config.zero_optimization
    threshold = zero.stage3_param_persistence_threshold if zero.stage == 3 else 0
    plans = plan_units(model, threshold, zero.stage3_model_persistence_threshold, param_groups(model, config))
    ranks = zero.shards_over(world_size)
    layouts = [UnitLayout([param.shape for param in plan.params], ranks, zero.stage == 0) for plan in plans]
    triples = zip(plans, layouts, homes(plans, layouts, config), strict=True)
    return [_kept(config, plan, layout, home) for plan, layout, home in triples]


def _kept(config: Config, plan: UnitPlan, layout: UnitLayout, home: Home) -> Kept:
    zero, item, shard = config.zero_optimization, config.compute_dtype.itemsize, layout.shard_numel
    gradient = config.gradient_bytes(sums_have_16_bits=True)
    if not plan.params[0].requires_grad:
        return Kept(plan, layout, home, gradient, 0, 0, 0.0, False)
    master = 2 if config.bf16.without_masters else 4
    moment = 2 if config.bf16.without_masters and config.bf16.bf16_optimizer_states else 4
    state = (coded_bytes(shard) if zero.zero_quantized_moments else shard * moment) * _moments(config, plan)
    ratio = 0.0 if home.optimizer == DEVICE else zero.offload_optimizer.ratio
    offloaded = 1.0 if ratio == "auto" else ratio
    shares = item == master and _is_own_master(zero, *home)
    return Kept(plan, layout, home, gradient, shard * master, state, offloaded, shares)


def homes(plans: Sequence[UnitPlan], layouts: Sequence[UnitLayout], config: Config) -> Iterator[Home]:
    """The home of each unit. Of weights for files, the first `max_in_cpu` elements of a rank stay in host memory."""
    zero, item = config.zero_optimization, config.compute_dtype.itemsize
    in_memory = zero.offload_param.max_in_cpu if zero.offloads_params and zero.offload_param.device == "nvme" else 0
    for plan, layout in zip(plans, layouts, strict=True):
        in_memory -= layout.numel // layout.world_size
        weights = optimizer = DEVICE
        if zero.offloads_params and zero.stage == 3 and not plan.persistent:
            weights = place(zero.offload_param.device, layout.shard_numel * item)
            weights = HOST if in_memory >= 0 else weights
        if zero.offloads_optimizer and zero.stage:
            optimizer = place(zero.offload_optimizer.device, layout.shard_numel * 4)
        yield Home(weights, optimizer)


def place(device: str, nbytes: float) -> str:
    """Where a tensor of this size is offloaded to: small ones stay in host memory."""
    return DISK if device == "nvme" and nbytes >= LEAST_BYTES_IN_A_FILE else HOST


def _is_own_master(zero: ZeroConfig, home: str, place: str) -> bool:
    """Whether a shard at `home`, in the masters' dtype, is the master at `place`; see `OptimizerShard.make_master`."""
    if home == DISK:
        return place == DISK and zero.offload_param.nvme_path == zero.offload_optimizer.nvme_path
    return home == place or (home, place) == (HOST, DISK)


def _moments(config: Config, plan: UnitPlan) -> float:
    """Values of the optimizer's state for each parameter element. Without a section: AdamW, the Trainer's own."""
    if config.optimizer is None:
        return 2
    if config.optimizer.type == "Muon":  # and AdamW for all but the hidden matrices
        matrices = sum(
            p.numel() for p, name in zip(plan.params, plan.param_names, strict=True) if is_hidden_matrix(p, name)
        )
        return 2 - matrices / sum(param.numel() for param in plan.params)
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    optimizer = build_optimizer(config, None, [param], nn.Module())
    optimizer.step()
    return sum(value.dim() for value in optimizer.state[param].values() if isinstance(value, torch.Tensor))
