"""Builds the parts of an engine from its settings: groups, schedule, reducer.

This file decides what the configuration's keys mean for each part. `make_groups` shards the model,
and `place_buffers` broadcasts its buffers. Nothing is trained here. This file knows nothing about
DeepSpeed."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn

from zero.comm.communicator import Communicator
from zero.comm.control import Record, flat, hyper_parameters, versions
from zero.comm.quantized import CompressedCommunicator, machine_size
from zero.comm.world import ranks_of_machine
from zero.config import Config, OffloadOptimizerConfig, ZeroConfig
from zero.core.gathering import Gathering
from zero.core.layout import GroupPlan, packs_experts, plan_groups
from zero.core.micro_batches import MicroBatches
from zero.core.optimizer_shard import OptimizerShard, place_shards
from zero.core.param_group import ParamGroup, owning_group
from zero.core.quantized_weights import (
    LEAST_BYTES,
    is_quantized,
    keeps_codes_in_buffers,
    quantized_tensors,
    reachable,
)
from zero.core.reduction import GradientReducer
from zero.core.schedule import Residency, Schedule
from zero.core.secondary_partition import SecondaryPartitionGroup
from zero.core.sharded_param import cut_of, holders_of, local, parts_of
from zero.device import is_accelerator
from zero.errors import UsageError, rounded
from zero.model_checks import IN_FP16, STRICTLY, check_model, kept_in_fp32, refuse_doubles
from zero.offload.tiers import Tier
from zero.optim.adam_cpu import has_adams_moments
from zero.optim.elementwise import is_elementwise
from zero.optim.loss_scaler import LossScaler
from zero.optim.rounding import StochasticRounding
from zero.optim.sharded_optimizer import ZeroOptimizer, param_group_of
from zero.releases import newer_than_tested
from zero.slicing.experts import SlicedExperts, can_be_sliced, numel_of_one

logger = logging.getLogger("zero")

# Files that move fewer bytes in a step are not worth a line.
LEAST_BYTES_TOLD = 10**9


def require_agreement(
    comm: Communicator, settings: Config, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """Raise UsageError unless the ranks of `comm` train the same, and all of the job in the same
    way.
    """
    found, of_world = facts(settings, model, optimizer), {}
    if comm.model is not None:  # ranks of another world may have other parameters
        own = [key for key in found if key.startswith("parameter ") or key.endswith(", params")]
        of_world = {key: found.pop(key) for key in own}
    comm.control("creating an engine").require_same(lambda: Record(found, of_world), comm.worlds)


def facts(
    settings: Config, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, object]:
    """What must be the same on all ranks. `nvme_path` may differ by machine."""
    keys = flat(settings.model_dump(), "configuration, ").items()
    found = {key: value for key, value in keys if not key.endswith("nvme_path")} | versions()
    found["optimizer"] = type(optimizer).__name__
    found |= hyper_parameters(optimizer.param_groups) if optimizer is not None else {}
    for name, param in model.named_parameters():
        frozen = "" if param.requires_grad else " frozen"
        found[f"parameter {name}"] = f"{tuple(param.shape)} {param.dtype}{frozen}"
    return found


def make_groups(
    model: nn.Module,
    settings: Config,
    comm: Communicator,
    residency: Residency,
    group_of: Mapping[nn.Parameter, int],
) -> list[ParamGroup]:
    """Shard the model's parameters.

    Those of one param group (`group_of`) lie next to each other in a group.
    """
    check_model(model)
    zero = settings.zero_optimization
    dtype = settings.sixteen_bit_dtype
    kept = partial(kept_in_fp32, list(model.modules()), list(model.named_parameters()))
    in_fp32, rounded = {}, {}
    if dtype is None:
        refuse_doubles(model)
    elif not settings.bf16.without_masters:
        in_fp32, rounded = kept(STRICTLY), kept(IN_FP16) if dtype == torch.float16 else {}
    if rounded and comm.job.rank == 0:
        logger.warning(
            "transformers keeps %s%s in fp32 in an fp16 model, and the engine trains them in fp16: "
            "results differ from those without ZeRO, and may overflow; use bf16",
            ", ".join([*rounded][:5]),
            " and others" * (len(rounded) > 5),
        )
    # Below stage 3 nothing is gathered for use; a group is what one reduction takes.
    threshold = zero.stage3_param_persistence_threshold if zero.stage == 3 else 0
    plans = plan_groups(
        model,
        threshold,
        zero.stage3_model_persistence_threshold,
        group_of,
        packed_too=zero.stage == 3,
        buffers=_sharded_buffers(model, zero),
        in_fp32=set(in_fp32.values()),
    )
    # bitsandbytes' forward in eval mode repacks weights for some CPUs. Sharded ones stay.
    for module in cast(Any, model).modules() if zero.stage == 3 else ():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False
    for param in () if dtype is None else model.parameters():
        # In no group, but it must have the dtype of the layer's inputs.
        is_empty = param.numel() == 0 and param.is_floating_point()
        if is_empty or getattr(param, "keeps_codes_when_cast", False):
            param.data = param.data.to(dtype)
    tiers = _tiers(plans, settings, comm)
    # Without fp32 masters nothing keeps the fp32 values of a model.
    masters = None
    if not settings.bf16.without_masters:
        masters = Tier.of(zero.offload_optimizer, settings.aio, comm.device)
    second = zero.second_shards_over(comm.world_size)
    make = ParamGroup
    if second:
        make = partial(SecondaryPartitionGroup, group_comm=comm.within(second))
    return [
        make(
            replace(plan, persistent=plan.persistent or zero.stage < 3),
            holders_of(plan.params[0]) or comm,
            residency,
            dtype=torch.float32 if plan.in_fp32 else dtype,
            tier=tier,
            master_tier=masters if any(param in group_of for param in plan.params) else None,
            replicated=zero.stage == 0,
            strict=zero.enable_sanity_checks,
        )
        for plan, tier in zip(plans, tiers, strict=True)
    ]


def _sharded_buffers(model: nn.Module, zero: ZeroConfig) -> bool | None:
    """Which buffers are sharded, as `quantized_tensors` takes it."""
    if zero.stage < 3 or zero.stage3_shard_buffers is not None:
        return zero.stage == 3 and zero.stage3_shard_buffers
    return None if keeps_codes_in_buffers(model) else False


def _tiers(plans: Sequence[GroupPlan], settings: Config, comm: Communicator) -> list[Tier]:
    """Where the shard of each group lives.

    With files the first `max_in_cpu` elements stay in host memory.
    """
    zero = settings.zero_optimization
    tier = Tier.of(zero.offload_param if zero.offloads_params else None, settings.aio, comm.device)
    offload = zero.offload_param
    in_memory = offload.max_in_cpu if offload is not None and tier.file is not None else 0
    found = []
    for plan in plans:
        ranks = (holders_of(plan.params[0]) or comm).shard_group.size
        in_memory -= sum(local(param).numel() for param in plan.params) // ranks
        found.append(tier.in_memory() if in_memory >= 0 or plan.persistent else tier)
    return found


def place_buffers(model: nn.Module, comm: Communicator, dtype: torch.dtype | None = None) -> None:
    """Move buffers that are not sharded to the compute device, with rank 0's values everywhere.

    `dtype`: of the floating-point ones; None: they keep theirs.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if owning_group(buffer) is not None:
                continue
            placed = buffer.to(comm.device, dtype if buffer.is_floating_point() else None)
            if placed.numel():
                placed = placed.contiguous()
                comm.broadcast(placed, src=0)
            module._buffers[name] = placed


def make_schedule(groups: Sequence[ParamGroup], settings: Config) -> Schedule:
    zero, sizes = settings.zero_optimization, [group.layout.numel for group in groups]
    ahead = zero.stage3_prefetch_bucket_size
    offload = zero.offload_param
    if zero.offloads_params and offload is not None and offload.device == "nvme":
        ahead = min(ahead, offload.buffer_count * offload.buffer_size)
    return Schedule(sizes, ahead, zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance)


def warn_if_crowded(groups: Sequence[ParamGroup], limit: int) -> None:
    """Warn if most groups do not fit next to the one in use, because communication then does not
    overlap with computation.

    Args:
        limit: `stage3_max_live_parameters`. A user who sets it below the default wants to save
            memory, and gets no warning.
    """
    sizes = [group.layout.numel for group in groups if not group.persistent]
    pairs = [(sum(pair), pair[1]) for pair in pairwise(sizes)]
    late = [size for both, size in pairs if both > limit]
    if limit >= ZeroConfig().stage3_max_live_parameters and 2 * sum(late) > sum(sizes):
        needed = max(both for both, _ in pairs)
        logger.warning(
            "zero_optimization.stage3_max_live_parameters is %s: too small for two of this model's "
            "largest blocks, so most all-gathers overlap with no computation. %s would be enough",
            f"{limit:,}",
            f"{needed:,}",
        )


def tell_time_of_files(
    groups: Sequence[ParamGroup], optimizer: ZeroOptimizer, settings: Config, comm: Communicator
) -> None:
    """Log how long files take in a step, if they move much and take more than twice as long as host
    memory would. Every rank must call. Two moments are assumed, as Adam has them.
    """
    zero = settings.zero_optimization
    offloads = zero.offload_param, zero.offload_optimizer
    if not any(each is not None and each.device == "nvme" for each in offloads):
        return
    moments = 2 if zero.zero_quantized_moments else 8
    steps = settings.gradient_accumulation_steps or 1
    nbytes, file, later = 0, None, 0
    for group in reversed(groups):
        # Read in each forward but the first, which has it from the update, and in backward, unless
        # it has stayed, as the groups that are used last in forward do.
        live, between = later + group.layout.numel, 2 * later
        stays = (
            live <= zero.stage3_max_live_parameters and between <= zero.stage3_max_reuse_distance
        )
        uses, later = (1 if stays else 2) * steps - 1, live
        shard = optimizer.shards.get(group)
        if group.tier.holds_in_file(group.shard):
            is_written = shard is not None and not shard.shares_weights
            file, nbytes = group.tier.file, nbytes + group.shard.nbytes * (uses + is_written)
        if shard is not None and shard.tier.puts_in_file(shard.master.nbytes):
            master = shard.master.nbytes * shard.tier.holds_in_file(shard.master)
            file, nbytes = shard.tier.file, nbytes + 2 * (master + moments * shard.master.numel())

    def measure() -> tuple[float, float, float]:
        if file is None or nbytes < LEAST_BYTES_TOLD:
            return 0.0, 0.0, 0.0
        speed, of_memory = file.measure(32 << 20, 0.2)
        return nbytes / speed, nbytes / of_memory, speed

    # At the same time on all ranks, because they may share disks.
    in_files, in_memory, speed = max(comm.control("files of a step").exchange(measure))
    if comm.job.rank == 0 and in_files > 2 * in_memory:
        logger.warning(
            "files: about %s GB a step on each rank, %s s at this disk's %s GB/s; "
            "in host memory %s s",
            *map(rounded, (in_files * speed / 1e9, in_files, speed / 1e9, in_memory)),
        )


def make_training_comm(
    settings: Config, comm: Communicator, groups: Sequence[ParamGroup]
) -> Communicator:
    """The communicator that gathers weights for use and reduces gradients of the groups that all
    ranks have: `comm`, or a `CompressedCommunicator`, which passes on to it what it does not
    compress.
    """
    zero = settings.zero_optimization
    weights = zero.stage == 3 and zero.zero_quantized_weights
    frozen_weights = zero.stage == 3 and zero.zero_quantized_nontrainable_weights
    bits = zero.zero_quantized_gradient_bits if zero.zero_quantized_gradients else None
    if comm.shard_group.size == 1 or not (weights or frozen_weights or bits):
        return comm
    if bits and comm.replicate_group.size > 1:
        raise UsageError(
            "zero_optimization.zero_quantized_gradients: not available where "
            f"{comm.replicate_group.size} groups of "
            "ranks hold all shards; set it to false, or shard over all ranks"
        )
    machine = _machines(comm) if bits else None
    compressed: Any = CompressedCommunicator(  # it has all methods, most of them by `__getattr__`
        comm, weights=weights, frozen_weights=frozen_weights, gradient_bits=bits, machine=machine
    )
    for group in groups:
        if group.comm is comm:
            group.training_comm = compressed
    return compressed


def _machines(comm: Communicator) -> Communicator | None:
    """`comm` with the ranks of each machine as shard groups.

    None if it is one machine, or if their sizes differ.
    """
    # A host's name alone would not do: some launchers start all ranks in containers of one name.
    number = comm.job.rank // (ranks_of_machine() or 1)
    machines = comm.control("finding the machines").exchange(lambda: (platform.node(), number))
    # the same on all ranks
    size, *others = {machine_size([machines[rank] for rank in world]) for world in comm.worlds}
    return comm.within(size) if 1 < size < comm.shard_group.size and not others else None


def slice_experts(
    groups: Sequence[ParamGroup], schedule: Schedule, gathering: Gathering
) -> list[SlicedExperts]:
    """Have experts of more elements than may be gathered run in slices, for which half of the limit
    is set aside.
    """
    limit = schedule.max_live_parameters
    found = [group for group in groups if group.layout.numel > limit and can_be_sliced(group)]
    if cut := next((group for group in found if any(map(cut_of, group.params))), None):
        raise UsageError(
            f"zero_optimization.stage3_max_live_parameters is {limit}, and {cut} has "
            f"{cut.layout.numel} elements: "
            "experts that are divided over ranks cannot run in slices; "
            f"set it to {2 * cut.layout.numel} or more"
        )
    if not found:
        return []
    most = max(limit // 2, *map(numel_of_one, found))
    schedule.limit_live_parameters(max(0, limit - most))
    return [SlicedExperts(group, most, gathering) for group in found]


def make_shards(
    groups: Sequence[ParamGroup], settings: Config, device: torch.device, trains: bool
) -> list[OptimizerShard]:
    """The optimizer's part of each trainable group, where the configuration wants it.

    If the engine has no optimizer: on the device.
    """
    here, trainable = Tier(device), [group for group in groups if group.trainable]
    if not trains:
        return place_shards(trainable, here, here, ratio=0.0)
    offload = settings.zero_optimization.offload_optimizer or OffloadOptimizerConfig()
    there = Tier.of(offload, settings.aio, device)
    return place_shards(trainable, here, there, offload.ratio, offload.max_in_cpu)


def make_reducer(
    settings: Config,
    comm: Communicator,
    shards: Sequence[OptimizerShard],
    micro_batches: MicroBatches,
) -> GradientReducer:
    zero = settings.zero_optimization
    # gloo's messages are added in fp32. An accelerator's sums of 16-bit gradients have 16 bits
    # themselves.
    return GradientReducer(
        comm,
        shards,
        micro_batches,
        bucket_size=zero.reduce_bucket_size,
        overlap=bool(zero.overlap_comm),
        contiguous=zero.contiguous_gradients,
        dtype=settings.message_dtype,
        sum_dtype=settings.sum_dtype,
        narrow=settings.narrows_gradients and (is_accelerator(comm.device) or comm.world_size == 1),
        deferred=zero.stage < 2,
    )


def make_optimizer(
    kind: type[ZeroOptimizer],
    inner: torch.optim.Optimizer,
    settings: Config,
    *,
    reducer: GradientReducer,
    shards: Sequence[OptimizerShard],
    scaler: LossScaler | None,
    groups: Sequence[ParamGroup],
    schedule: Schedule,
    steps: Callable[[], int],
) -> ZeroOptimizer:
    """`kind` over `inner`, whose parameters must be the model's.

    `steps` counts the steps so far.
    """
    known = {param for group in groups for param in group.params}
    if strangers := [
        param for param in param_group_of(inner) if param not in known and param.numel()
    ]:
        raise UsageError(
            f"the optimizer has {len(strangers)} parameter(s) that are not the model's, the first "
            f"one of shape {tuple(strangers[0].shape)}: give them an optimizer of their own"
        )
    elementwise, cut = updates_elements(inner, settings), next(filter(cut_of, known), None)
    if cut is not None and not elementwise:
        raise UsageError(
            f"optimizer {type(inner).__name__} updates whole tensors, and some of them are divided "
            "over ranks (tensor_parallel, expert_parallel), such as one of "
            f"shape {tuple(cut.shape)}: use an element-wise optimizer, such as AdamW"
        )
    zero, bf16 = settings.zero_optimization, settings.bf16
    offload = zero.offload_optimizer or OffloadOptimizerConfig()
    return kind(
        inner,
        reducer,
        reducer.comm,
        shards,
        sub_group_size=zero.sub_group_size,
        elementwise=elementwise,
        clipping=settings.gradient_clipping,
        scaler=scaler,
        reduce_op=settings.gradient_allreduce_op,
        checks_overflow=bf16.check_grad_overflow or not bf16.enabled,
        overlap=overlaps_step(offload, reducer.comm.device),
        buffers=4 * offload.buffer_count * offload.buffer_size if offload.pipeline_read else 0,
        write_behind=offload.pipeline_write,
        forward_order=lambda: [groups[i] for i in schedule.recorded(("train", True, None))],
        rounding=StochasticRounding(bf16.rounding_seed, steps) if bf16.without_masters else None,
        state_dtype=_state_dtype(inner, settings, elementwise),
    )


def _state_dtype(
    optimizer: torch.optim.Optimizer, settings: Config, elementwise: bool
) -> torch.dtype:
    """In which dtype the optimizer's state is kept; uint8: as codes (`zero.optim.adam8bit`)."""
    narrow = settings.bf16.without_masters and settings.bf16.bf16_optimizer_states
    if narrow and not elementwise:
        raise UsageError(
            f"bf16.bf16_optimizer_states: {type(optimizer).__name__} updates whole tensors, and "
            "their state has the dtype that the optimizer gives it; set it to false"
        )
    if not settings.zero_optimization.zero_quantized_moments:
        return torch.bfloat16 if narrow else torch.float32
    if narrow:
        raise UsageError(
            "zero_optimization.zero_quantized_moments: moments cannot be both codes and bf16; set "
            "bf16.bf16_optimizer_states to false"
        )
    if not elementwise or not has_adams_moments(optimizer):
        raise UsageError(
            "zero_optimization.zero_quantized_moments: acts on torch's Adam and AdamW, element by "
            f"element and without amsgrad; the optimizer is {type(optimizer).__name__}; take one "
            "of them, or set it to false"
        )
    return torch.uint8


def updates_elements(optimizer: torch.optim.Optimizer, settings: Config) -> bool:
    """Whether the optimizer's state may be split at any element. The configuration decides, or
    else the optimizer's class.
    """
    told = settings.zero_optimization.elementwise_optimizer
    return is_elementwise(optimizer) if told is None else told


def overlaps_step(offload: OffloadOptimizerConfig, device: torch.device) -> bool:
    """Whether updates run after `step` has returned: by default with files, and if other cores
    compute the forward.
    """
    if offload.overlap_step is not None and offload.device != "none":
        return offload.overlap_step
    return offload.device == "nvme" or (offload.device == "cpu" and is_accelerator(device))


def make_scheduler(given: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    """The learning-rate scheduler that was given, or what the given function makes of the
    optimizer.
    """
    if hasattr(given, "get_last_lr") and getattr(given, "optimizer", optimizer) is not optimizer:
        raise UsageError(
            "initialize: lr_scheduler belongs to another optimizer; pass that optimizer too, or a "
            "function that makes the scheduler of the configured optimizer"
        )
    return given(optimizer) if callable(given) and not hasattr(given, "get_last_lr") else given


# -- lines for the table at the start of a run


def describe(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Config, comm: Communicator
) -> str:
    """What the configuration does not say: how the optimizer's state is sharded, which parameters
    stay on the ranks that have them, what quantized weights take, which libraries are newer than
    tested, and whether offload is needed.
    """
    ranks = settings.zero_optimization.shards_over(comm.world_size)
    lines = [
        *_describe_optimizer(optimizer, settings),
        *_describe_parts(model),
        *describe_quantized(model, settings, ranks),
        newer_than_tested(),
        *_describe_offload(model, settings, ranks, comm.device),
    ]
    return "".join(f"\n{line}" for line in lines if line)


def _describe_optimizer(optimizer: torch.optim.Optimizer | None, settings: Config) -> Iterator[str]:
    if optimizer is not None:
        is_whole = settings.zero_optimization.stage == 0
        owner = "on every rank" if is_whole else "each on the rank that owns it"
        cut = "element by element, in the shards of the weights"
        how = cut if updates_elements(optimizer, settings) else f"whole tensors, {owner}"
        yield f"optimizer {type(optimizer).__name__} updates {how}"


def _describe_parts(model: nn.Module) -> Iterator[str]:
    named = model.named_parameters()
    found = [(n, param, held) for n, param in named if (held := holders_of(param)) is not None]
    if found:
        name, first, holders = found[0]
        size = holders.world_size
        yield (
            f"1/{parts_of(first)} of {name!r} and {len(found) - 1} others on "
            f"each rank, {sum(local(param).numel() for _, param, _ in found):,} elements; "
            f"{size} rank{'s have' if size > 1 else ' has'} the same part"
        )


_REGISTERED = ("_parameters", "_buffers", "_modules")  # attributes of a module with their own names


def describe_quantized(model: nn.Module, settings: Config, ranks: int) -> Iterator[str]:
    """What quantized weights take on each rank, and what of them is not sharded. `ranks`: over how
    many they are cut.
    """
    zero = settings.zero_optimization
    sharded: dict[torch.Tensor, str] = {}
    whole: dict[torch.Tensor, str] = {}
    experts: dict[torch.Tensor, str] = {}
    of_experts = in_fp32 = 0
    for prefix, module in model.named_modules():
        params = dict(module.named_parameters(recurse=False))
        found = quantized_tensors(module, _sharded_buffers(model, zero))
        own = {each.tensor: each.name for each in found}
        sharded |= own
        in_fp32 += bool(found) and getattr(module, "compute_dtype", None) == torch.float32
        if packs_experts(module):
            of_experts += _nbytes(own)
            experts |= {
                param: f"{prefix}.{name}"
                for name, param in params.items()
                if param.dim() == 3 and not (param.requires_grad or is_quantized(param))
            }
        kept = own.keys() | {alias for each in found for alias in each.aliases}
        kept |= {param for param in params.values() if param.is_floating_point()}
        plain = {key: value for key, value in vars(module).items() if key not in _REGISTERED}
        buffers = dict(module.named_buffers(recurse=False))
        for name, value in (plain | params | buffers).items():
            for path, tensor in reachable(value, f"{prefix}.{name}".lstrip(".")):
                is_code = bool(found) or is_quantized(tensor) or name in params
                if is_code and tensor not in kept and local(tensor).nbytes >= LEAST_BYTES:
                    whole[tensor] = path

    def share(nbytes: int) -> str:
        if zero.stage < 3:
            return "all of them on every rank, because only stage 3 shards weights"
        return f"{-(-nbytes // ranks):,} on each of {ranks} ranks"

    def named(tensors: Mapping[torch.Tensor, str]) -> str:
        first, *others = tensors.values()
        more = f" and {len(others)} more" if others else ""
        return f"{first!r}{more}, {_nbytes(tensors):,} bytes"

    if sharded:
        part = f" ({of_experts:,} of them for fused experts)" if of_experts else ""
        total = _nbytes(sharded)
        yield f"quantized weights take {total:,} bytes{part}, {share(total)}"
    if sharded and experts:
        yield f"experts that are not quantized: {named(experts)}, {share(_nbytes(experts))}"
    if in_fp32 and settings.compute_dtype != torch.float32:
        dtype = str(settings.compute_dtype)
        yield (
            f"{in_fp32} quantized layers compute in fp32, which is slow: set "
            f"bnb_4bit_compute_dtype={dtype} in BitsAndBytesConfig (with TRL's scripts, --dtype "
            f"{dtype.removeprefix('torch.')})"
        )
    if whole and zero.stage == 3:
        yield f"not sharded: {named(whole)} on every rank"


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local(tensor).nbytes * parts_of(tensor) for tensor in tensors)


def _describe_offload(
    model: nn.Module, settings: Config, ranks: int, device: torch.device
) -> Iterator[str]:
    """A line where all that is offloaded would take less than half of the device. `ranks`: over how
    many it is cut.
    """
    zero = settings.zero_optimization
    if not is_accelerator(device) or not (zero.offloads_params or zero.offloads_optimizer):
        return
    item, masters = settings.compute_dtype.itemsize, 0 if settings.bf16.without_masters else 4
    params = [(param, local(param)) for param in model.parameters()]
    weights = sum(p.numel() * item if p.is_floating_point() else p.nbytes for _, p in params)
    trained = sum(shown.numel() for param, shown in params if param.requires_grad)
    state = trained * (settings.sum_dtype.itemsize + 8 + (masters if item < 4 else 0)) // ranks
    nbytes = state + (weights // ranks if zero.stage == 3 else weights)
    capacity = torch.accelerator.get_memory_info(device)[1]
    if 2 * nbytes <= capacity:
        yield (
            "offload may not be needed: weights, gradients and two moments take "
            f"{nbytes / 2**30:.2f} GiB of the {capacity / 2**30:.1f} of each device. The fastest "
            f"configuration that fits: zero plan MODEL --device-memory {capacity / 2**30:.0f}G"
        )
