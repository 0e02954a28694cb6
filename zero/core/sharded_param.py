"""What a parameter shows while its group is sharded, and how a read of it is noticed.

A sharded parameter keeps its true shape, dtype and device, and shows NaN. Its class is
`ShardedParameter` until it is unsharded. The object never changes. So autograd's leaf is always the
parameter itself, whether a module, a list, an activation checkpoint or
`torch.autograd.Function.apply` holds it.

This file knows nothing of modules or process groups. Of the group that holds a parameter's values
it uses two methods: `before_read`, and `unsharded` for copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from zero.errors import UsageError

if TYPE_CHECKING:
    from zero.core.param_group import ParamGroup

# Called with a sharded parameter and the function that is about to read it.
ReadHook = Callable[[nn.Parameter, Callable], None]


def owning_group(param: torch.Tensor) -> ParamGroup | None:
    """The group that holds the values of `param`; None for an ordinary parameter."""
    return getattr(param, "_zero_group", None)


def set_owning_group(param: nn.Parameter, group: ParamGroup | None) -> None:
    vars(param)["_zero_group"] = group


class Cut(Protocol):
    """How a parameter is cut over a model group. Each of its ranks has one part, and engines see
    that part alone.

    Attributes: index: the number of this rank's part. described: along which dimension it is cut,
    in how many blocks, each of which is cut, and in how many parts. A part has its pieces of all
    blocks."""

    index: int
    described: list[int]

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The whole from every rank's part. All ranks that have one must call it."""
        ...

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole."""
        ...


def cut_of(param: torch.Tensor) -> Cut | None:
    """How `param` is cut over this rank's model group; None if the rank has all of it."""
    return getattr(param, "_zero_cut", None)


def is_copy(param: torch.Tensor) -> bool:
    """Whether another rank of the model group has the same parameter, and counts and saves it."""
    return getattr(param, "_zero_is_copy", False)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a `DTensor` that is on this rank; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


_nan_scalars: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of NaN that has `shape`.

    All placeholders of a dtype and device share one element: never write to it.
    """
    key = (dtype, device)
    if key not in _nan_scalars:
        _nan_scalars[key] = torch.full((), float("nan"), dtype=dtype, device=device)
    return _nan_scalars[key].expand(shape)


_PROPERTIES_WITH_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
_METHODS_WITHOUT_VALUES = {
    *(
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_floating_point",
        "is_signed",
        "ndimension",
        "nelement",
    ),
    *(
        "numel",
        "size",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
    ),
    *(
        "new_empty",
        "new_full",
        "new_ones",
        "new_tensor",
        "new_zeros",
        "__len__",
        "__repr__",
        "__format__",
    ),
    *(
        "empty_like",
        "full_like",
        "ones_like",
        "rand_like",
        "randn_like",
        "zeros_like",
        "__reduce_ex__",
    ),
}


def needs_values(func: Callable) -> bool:
    """Whether `func`, as `__torch_function__` gets it, reads its arguments' values, not only their
    shape and dtype.
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _PROPERTIES_WITH_VALUES
    return name not in _METHODS_WITHOUT_VALUES and name not in ("__set__", "__delete__")


_WRITING_OPERATORS = {"__setitem__"} | {
    f"__i{name}__"
    for name in "add and div floordiv lshift mod mul or pow rshift sub truediv xor".split()
}


def written_by(func: Callable, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that `func`, as `__torch_function__` gets it, changes in place."""
    name, out = getattr(func, "__name__", ""), kwargs.get("out")
    target = None
    if name in _WRITING_OPERATORS or (
        name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    ):
        target = args[0] if args else kwargs.get("tensor")
    return [leaf for leaf in tree_leaves((target, out)) if isinstance(leaf, torch.Tensor)]


class PlaceholderView(torch.Tensor):
    """A view of a placeholder, such as `param.data` of a sharded parameter.

    It may be read, but not written.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if any(
            isinstance(each, (PlaceholderView, ShardedParameter))
            for each in written_by(func, args, kwargs)
        ):
            raise UsageError(
                f"{func.__name__} would write to a sharded parameter, which shows NaN here: write "
                "inside of "
                "`zero.GatheredParameters(param, modifier_rank=0)`"
            )
        with torch._C.DisableTorchFunctionSubclass():
            # A copy or a pickle must be an ordinary tensor.
            plain: Any = tree_map_only(
                cls, lambda view: view.as_subclass(torch.Tensor), (args, kwargs)
            )
            return tree_map_only(torch.Tensor, _refuse_writes, func(*plain[0], **plain[1]))


def _refuse_writes(tensor: torch.Tensor) -> torch.Tensor:
    shared = type(tensor) is torch.Tensor and any(
        torch._C._is_alias_of(tensor, nan)  # pyright: ignore[reportAttributeAccessIssue]
        for nan in _nan_scalars.values()
    )
    return tensor.as_subclass(PlaceholderView) if shared else tensor


class ShardedParameter(nn.Parameter):
    """The class of a parameter while it shows no values.

    A function that needs them tells its group first.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if needs_values(func):
            sharded = [
                leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedParameter)
            ]
            for param in sharded:
                group = owning_group(param)
                # Another parameter of the same group may have come first.
                if group is not None and isinstance(param, ShardedParameter):
                    group.before_read(param, func)
            if not any(isinstance(param, ShardedParameter) for param in sharded):
                return func(*args, **kwargs)
            return PlaceholderView.__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        """An ordinary parameter with the values.

        Its group is unsharded for that: all ranks must copy alike.
        """
        group = owning_group(self)
        assert group is not None
        with group.unsharded():
            copied = nn.Parameter(
                self.data.clone(memory_format=torch.contiguous_format), self.requires_grad
            )
        memo[id(self)] = copied
        return copied


@cache
def _sharded_class(plain: type) -> type:
    return (
        ShardedParameter
        if plain is nn.Parameter
        else type("ShardedParameter", (ShardedParameter, plain), {})
    )


def show(param: nn.Parameter, values: torch.Tensor) -> None:
    """Make `values` (the shape of the parameter, or of its local part) what `param` shows."""
    if isinstance(param, ShardedParameter):
        param.__class__ = type(param).__bases__[-1]
    if local(param) is param:
        param.data = values
    else:
        # Autograd must not take a later all-gather for a change of what `to_local()` has given:
        # `.data` is no view. (A slot of DTensor's class: not in `vars(param)`.)
        param._local_tensor = values.data  # pyright: ignore[reportAttributeAccessIssue]


def take_over(param: nn.Parameter, nan: torch.Tensor) -> None:
    """Make an ordinary parameter, whatever device it is on, show the placeholder `nan`.

    It must not be in any graph.
    """
    if local(param) is param and not torch._has_compatible_shallow_copy_type(param, nan):
        # `param.data` cannot change to a device that torch does not have itself (PrivateUse1). The
        # object stays.
        fresh = nn.Parameter(nan, param.requires_grad)
        fresh.__class__ = type(param)
        vars(fresh).update(vars(param))
        torch.utils.swap_tensors(param, fresh)
    show(param, nan)


def hide(param: nn.Parameter, nan: torch.Tensor) -> None:
    """Make `param` show the placeholder `nan`, and notice its reads."""
    show(param, nan)
    param.__class__ = _sharded_class(type(param))
