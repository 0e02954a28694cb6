"""Expert parallelism over the data-parallel ranks: each rank of an expert group, which are
neighbours, has some experts of every layer, and works on a batch of its own.

[Note: the way of a token] A rank sends each token once for each expert that its router has chosen,
to the rank that has this expert. It runs its own experts on what it gets, and sends the results
back. There they are multiplied by the router's weights and summed. The backward pass goes the same
ways. These are all-to-alls of the expert group, which all of its ranks must start in the same
order, also a rank without tokens. In between, the numbers of tokens are exchanged.

transformers' plan says which parameters are experts, and its modules compute them. ZeRO shards a
rank's experts over the ranks that have the same ones: every `size`-th rank. The engine knows no
more than that (`zero.core.sharded_param.Cut.holders`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from zero.comm.communicator import Communicator
from zero.config import Config
from zero.core.quantized_weights import is_quantized, reachable
from zero.core.sharded_param import holders_of, parts_of
from zero.errors import UsageError
from zero.parallel.tensor import make_mesh, plan_of_experts, prepare_parameter, take_steps
from zero.slicing.blocks import Agree

_OF_PARAMETERS, _OF_MODULES = "grouped_gemm", "ep_dispatch_experts"
KEY = "expert_parallel.autoep_size"


def refuse_others(settings: Config, ranks: int) -> None:
    """Raise UsageError for settings with which experts over `ranks` ranks would not be exact."""
    zero = settings.zero_optimization
    found = {
        "sequence_parallel_size": settings.sequence_parallel_size > 1,
        "zero_optimization.mics_shard_size": zero.shards_over(ranks) != ranks,
        "zero_optimization.zero_hpz_partition_size": bool(zero.second_shards_over(ranks)),
        "zero_optimization.zero_quantized_weights": zero.zero_quantized_weights,
        "zero_optimization.zero_quantized_gradients": zero.zero_quantized_gradients,
        "zero_optimization.zero_quantized_nontrainable_weights": (
            zero.zero_quantized_nontrainable_weights
        ),
        'on_out_of_memory "adapt"': settings.on_out_of_memory == "adapt",
    }
    for key, is_set in found.items():
        if is_set:
            raise UsageError(
                f"{KEY} without tensor parallelism does not support {key}: delete one of them"
            )


def size_of(model: nn.Module) -> int:
    """Over how many ranks `divide` has divided the experts of a model; 1: it has not."""
    found = (param for param in model.parameters() if holders_of(param) is not None)
    return max(map(parts_of, found), default=1)


def agree_on_slices(model: nn.Module, comm: Communicator) -> Agree | None:
    """How ranks agree on the slices of a block's batch; None if they need not. Each slice has its
    all-to-alls, so that their number must be the same on all ranks."""
    if size_of(model) == 1:
        return None

    def agree(wanted: int, batch: int, checks: bool) -> tuple[int, int, bool]:
        asked = torch.tensor([-wanted, batch, -int(checks)], device=comm.device)
        of_all = comm.all_reduce(asked, "min").tolist()
        return -of_all[0], of_all[1], bool(of_all[2])

    return agree


@torch.no_grad()
def divide(
    model: nn.Module, size: int, comm: Communicator, dtype: torch.dtype | None
) -> dict[nn.Parameter, nn.Parameter]:
    """Leave each rank its part of the experts, with rank 0's values, for an engine that computes in
    `dtype` (None: their own dtypes). Returns the new parameters, by the ones that they replace.

    Raises UsageError for a model without a plan, for experts that are quantized otherwise than by
    `zero.hf.quantize_experts` or have adapters other than LoRA of their weights, and if `size` does
    not divide their number or that of the ranks. All ranks must call it."""
    if (earlier := size_of(model)) > 1:
        if earlier == size:
            return {}
        raise UsageError(f"{KEY} is {size}, and the model is already divided over {earlier} ranks")
    mesh = make_mesh(size, comm.world_size, comm.device, KEY)
    planned = _planned(model)
    tokens = comm.within(size)
    holders = comm.every(size)
    with _without_adapters(model) as adapters:

        def step(name: str, style: str) -> Callable[[], None]:
            if style == _OF_PARAMETERS:
                return partial(_take_part, planned, name, mesh, tokens, holders)
            module = planned.get_submodule(name)
            return partial(_send_tokens, module, name, size, tokens, adapters.get(module, []))

        plan = plan_of_experts(planned, size)
        for name, style in plan.items():
            if style not in (_OF_PARAMETERS, _OF_MODULES):
                kind = type(planned).__name__
                raise UsageError(
                    f"{KEY}: {kind}'s ep_plan has the style {style!r} for {name!r}, which needs "
                    f"tensor parallelism: set tensor_parallel.autotp_size to {size}"
                )
            _refuse_changed(planned, name, style, size)
        found = take_steps(planned, [(name, step(name, style)) for name, style in plan.items()])
    names = {param: name for name, param in model.named_parameters()}
    param: Any
    for param in found.values():
        if holders_of(param) is None:
            prepare_parameter(names[param], param, comm.device, dtype, holders)
    return found


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[dict[nn.Module, list[Any]]]:
    """Context in which PEFT's LoRA of experts' parameters is left out of the model, so that names
    are those of the plan. Yields the wrappers of each module of experts."""

    def adapts(module: Any) -> bool:
        # Not for a bias, which PEFT takes for a single matrix.
        return hasattr(module, "get_delta_factors") and module.num_experts > 1

    owners = [module for module in model.modules() if not adapts(module)]
    found = [
        (owner, name, child)
        for owner in owners
        for name, child in owner.named_children()
        if adapts(child)
    ]
    adapters = {}
    for owner, name, child in found:
        module: Any = child
        wrappers = [each for each in child.modules() if adapts(each)]
        adapters[module.get_base_layer()] = wrappers
        owner._modules[name] = module.get_base_layer()
    try:
        yield adapters
    finally:
        for owner, name, child in found:
            owner._modules[name] = child


def _planned(model: nn.Module) -> Any:
    """transformers' model in `model`, which may be wrapped; `model` itself if there is none."""
    from transformers import PreTrainedModel

    return next((each for each in model.modules() if isinstance(each, PreTrainedModel)), model)


def _refuse_changed(planned: Any, name: str, style: str, size: int) -> None:
    """Raise UsageError for experts that are not as transformers made them."""
    if style == _OF_PARAMETERS:
        param = planned.get_parameter(name)
        if not (is_quantized(param) or not param.is_floating_point()):
            return
        if not hasattr(param, "has_parts"):
            raise UsageError(
                f"{KEY}: {name!r} is quantized ({type(param).__name__} of {param.dtype}), and only "
                "codes of zero.hf.quantize_experts can be divided: delete the key, or use those"
            )
        if not param.has_parts(size):
            raise UsageError(
                f"{KEY}: {name!r} is quantized, and weights of two of {size} parts share a scale: "
                "divide it into fewer parts, or name it in llm_int8_skip_modules"
            )
        return
    module = planned.get_submodule(name)
    inside = [key for key, _ in module.named_parameters() if "." in key]
    if inside or not hasattr(module, "num_experts"):
        raise UsageError(
            f"{KEY}: {name!r} is a {type(module).__name__}"
            + f" with {inside[0]!r}" * bool(inside)
            + ": of adapters, only LoRA of weights by target_parameters is supported; adapt other "
            "layers, or delete the key"
        )


def _take_part(
    planned: Any, name: str, mesh: DeviceMesh, tokens: Communicator, holders: Communicator
) -> None:
    """Replace a parameter by this rank's part of it, with rank 0's values."""
    path, _, attribute = name.rpartition(".")
    whole = planned.get_parameter(name)
    values: Any = whole.detach().to(tokens.device)
    if is_quantized(whole):
        part = _part_of_codes(values, name, mesh, tokens, holders)
    else:
        values = values.contiguous()
        tokens.broadcast(values, src=0)
        part = distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None)
        part = nn.Parameter(part, whole.requires_grad)
    planned.get_submodule(path)._parameters[attribute] = part


def _part_of_codes(
    whole: Any, name: str, mesh: DeviceMesh, tokens: Communicator, holders: Communicator
) -> Any:
    """This rank's part of a quantized parameter, no DTensor, since its class can read experts."""
    for _, tensor in reachable(whole):
        tokens.broadcast(tensor, src=0)
    part = nn.Parameter(whole.part(mesh.get_local_rank(), mesh.size()), requires_grad=False)
    cut = CodesCut(name, holders, mesh.get_local_rank(), [0, 1, mesh.size()])
    for tensor in (part, *(tensor for _, tensor in reachable(part))):
        vars(tensor)["_zero_cut"] = cut
    return part


@dataclass(frozen=True)
class CodesCut:
    """How the quantized parameter `name`, and what is in it, is split over ranks: a
    `zero.core.sharded_param.Cut` that nothing puts together again.
    """

    name: str
    holders: Communicator
    index: int
    described: list[int]

    def gather(self, part: torch.Tensor) -> NoReturn:
        raise UsageError(
            f"{self.name!r} is quantized, and each rank has a part of it ({KEY}), so that it "
            "cannot be read as a whole: save the adapter"
        )

    of = gather


def _send_tokens(
    module: Any, name: str, size: int, tokens: Communicator, adapters: list[Any]
) -> None:
    module.num_experts = own = module.num_experts // size
    first = tokens.shard_group.rank * own
    module.forward = DispatchedExperts(module, name, tokens, adapters)
    for wrapper in adapters:
        wrapper.__class__ = _divided_class(type(wrapper))
        wrapper.own_experts = slice(first, first + own)


class _DividedWrapper:
    """The first base class of PEFT's wrapper of a parameter of which this rank has a part, that of
    `own_experts`.
    """

    def forward(self: Any, *args: Any) -> Any:
        """The adapter is added where the experts run."""
        return self.base_layer(*args)

    def get_delta_weight(self: Any, adapter_name: str) -> torch.Tensor:
        """What a merge adds to the part."""
        whole: torch.Tensor = cast(Any, super()).get_delta_weight(adapter_name)
        part, param = whole[self.own_experts], self.get_param()
        if not isinstance(param, DTensor):
            return part
        return DTensor.from_local(part, param.device_mesh, param.placements, run_check=False)

    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        if safe_merge:  # assigns to the `data` of a DTensor, which would change nothing
            raise UsageError(
                f"{KEY}: a merge into {self.parameter_name!r}, of which each rank has a part, does "
                "not support safe_merge=True: leave it out"
            )
        cast(Any, super()).merge(adapter_names=adapter_names)


@cache
def _divided_class(plain: type) -> type:
    return type(plain.__name__, (_DividedWrapper, plain), {})


class DispatchedExperts:
    """Replaces the forward of a module of experts, of which this rank has a part.

    Args:
        name: of the module, for messages.
        comm: its shard group is the expert group.
        adapters: PEFT's wrappers of its parameters. They have factors for all experts, on each
            rank, which gives a gradient to those of its own: the sum over all ranks is whole.
    """

    def __init__(self, module: Any, name: str, comm: Communicator, adapters: list[Any]):
        self.module = module
        self.name = name
        self.comm = comm
        self.adapters = adapters
        # Disabled here instead of by a decorator, which would import the compiler together with
        # this file.
        self._run: Any = torch.compiler.disable(self._run_experts)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Run the experts. The arguments have transformers' names: (tokens, width), and the chosen
        experts of each token and their weights, both (tokens, experts per token).
        """
        return self._run(hidden_states, top_k_index, top_k_weights)

    def __deepcopy__(self, memo: dict) -> Callable:
        """A copy of the module is divided in the same way."""
        adapters = [memo[id(each)] for each in self.adapters]
        return DispatchedExperts(memo[id(self.module)], self.name, self.comm, adapters)

    def _run_experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        chosen = index.reshape(-1)
        order = chosen.argsort(stable=True)
        sent, received, of_rows = self.agree(chosen)
        rows = _Exchange.apply(hidden[order // index.size(-1)], self, sent, received)
        found = _Exchange.apply(self._of_own(rows, of_rows), self, received, sent)
        found = found.new_empty(found.shape).index_copy(0, order, found)
        found = found.view(*weights.shape, -1) * weights.unsqueeze(-1)
        return found.sum(1).to(hidden.dtype)

    def agree(self, chosen: torch.Tensor) -> tuple[list[int], list[int], torch.Tensor]:
        """How many rows go to each rank, how many come from each, and which of this rank's experts
        each of those needs. `chosen`: the expert of each row of this rank, 1-D.
        """
        ranks, experts = self.comm.shard_group.size, self.module.num_experts
        sent = torch.bincount(chosen, minlength=ranks * experts).view(ranks, experts)
        received = self.exchange(sent, [1] * ranks, [1] * ranks)
        of_rows = torch.arange(experts, device=chosen.device).repeat(ranks)
        of_rows = of_rows.repeat_interleave(received.view(-1))
        # The host waits for these numbers.
        to, come = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        return to, come, of_rows

    def exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send rows to the ranks of the group, so many to each, and return those that come."""
        result, width = rows.new_empty(sum(received), rows.size(1)), rows.size(1)
        pending = self.comm.start_all_to_all_of_parts(
            result.view(-1),
            rows.contiguous().view(-1),
            [number * width for number in received],
            [number * width for number in sent],
            f"the all-to-all of tokens of {self.name}",
        )
        with self.comm.clock.waiting("tokens"):
            pending.wait()
        return result

    def _of_own(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """This rank's experts on the rows that it got. `index`: the expert of each row, 1-D.

        Without rows, they run on one of zeros, so that their parameters are in the graph.
        """
        is_empty = not len(rows)
        if is_empty:
            rows, index = rows.sum(0, keepdim=True), index.new_zeros(1)
        with self._local_parameters():
            forward = MethodType(type(self.module).forward, self.module)
            found = forward(rows, index.unsqueeze(1), rows.new_ones(len(rows), 1))
        return found[:0] if is_empty else found

    @contextmanager
    def _local_parameters(self) -> Iterator[None]:
        """Context in which the module has tensors with this rank's part, as kernels need them, and
        with what adapters add."""
        own = dict(self.module._parameters)
        local = {k: p.to_local() if isinstance(p, DTensor) else p for k, p in own.items()}
        for wrapper in self.adapters:
            names = [] if wrapper.disable_adapters or wrapper.merged else wrapper.active_adapters
            for name in filter(wrapper.lora_A.__contains__, names):
                left, right, scale = wrapper.get_delta_factors(name)
                weights = local[wrapper.parameter_name]
                part = wrapper.own_experts
                changed = torch.baddbmm(weights, left[part], right[part], alpha=scale)
                local[wrapper.parameter_name] = changed
        self.module._parameters.update(local)
        try:
            yield
        finally:
            self.module._parameters.update(own)


class _Exchange(torch.autograd.Function):
    """Rows, in the order of the ranks to which they go, for those that come from there."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, of: DispatchedExperts, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        ctx.way = of, received, sent
        return of.exchange(rows, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        of, *sizes = ctx.way
        return of.exchange(grad, *sizes), None, None, None
