"""What a parameter shows while its group is sharded, and how a read of it is detected.

A sharded parameter keeps its true shape, dtype and device, and shows NaN. Its class is
`ShardedParameter` until it is unsharded. The object never changes, so autograd's leaf is always the
parameter itself, whether a module, a list, an activation checkpoint or
`torch.autograd.Function.apply` holds it.

Of the group that holds a parameter's values, only `read_hook` is used here, and `unsharded` for
copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from zero.comm.communicator import Communicator
from zero.errors import UsageError

# Called with a sharded parameter and the function that is about to read it.
ReadHook = Callable[[nn.Parameter, Callable], None]


def owner_of(param: torch.Tensor) -> Any:
    """The group that holds the values of `param`; None for an ordinary parameter. Above of this
    file, `zero.core.param_group.owning_group` has its type.
    """
    return getattr(param, "_zero_group", None)


def set_owner(param: torch.Tensor, owner: object) -> None:
    vars(param)["_zero_group"] = owner


class Cut(Protocol):
    """How a parameter is split over some ranks. Each of them has one part, and engines see only
    that.

    Attributes:
        holders: the ranks that have the same part; None: all of an engine's.
        index: the number of this rank's part.
        described: along which dimension it is split, into how many blocks, each of which is split,
            and into how many parts. A part consists of its pieces of all blocks.
    """

    holders: Communicator | None
    index: int
    described: list[int]

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The whole, put together from every rank's part. All ranks that have one must call it."""
        ...

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole."""
        ...


def cut_of(param: torch.Tensor) -> Cut | None:
    """How `param` is split over ranks; None if this rank has all of it."""
    return getattr(param, "_zero_cut", None)


def holders_of(param: torch.Tensor) -> Communicator | None:
    """The ranks that have the same part of `param` as this one; None: all of an engine's."""
    cut = cut_of(param)
    return None if cut is None else cut.holders


def parts_of(param: torch.Tensor) -> int:
    """Into how many parts `param` is split over ranks."""
    cut = cut_of(param)
    return 1 if cut is None else cut.described[-1]


def is_copy(param: torch.Tensor) -> bool:
    """Whether another rank of the model group has the same parameter, and counts and saves it."""
    return getattr(param, "_zero_is_copy", False)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a `DTensor` that is on this rank; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


_nan_scalars: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of NaN, or of the largest integer, that has `shape`.

    All placeholders of a dtype and device share one element: never write to it.
    """
    key = (dtype, device)
    if key not in _nan_scalars:
        # Not `torch.full`, which lacks some dtypes of 8 bits. With all bits set a float is NaN.
        bits = torch.full((dtype.itemsize,), 0xFF, dtype=torch.uint8, device="cpu")
        if dtype == torch.bool:
            bits[0] = 1
        elif dtype.is_signed and not (dtype.is_floating_point or dtype.is_complex):
            bits[-1] = 0x7F
        _nan_scalars[key] = bits.view(dtype).view(()).to(device)
    return _nan_scalars[key].expand(shape)


_WITHOUT_VALUES = frozenset(
    "dim element_size get_device is_complex is_contiguous is_floating_point is_pinned is_set_to "
    "is_shared is_signed ndimension nelement numel size storage_offset stride data_ptr "
    "register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad new_empty "
    "new_empty_strided new_full new_ones new_tensor new_zeros empty_like full_like ones_like "
    "rand_like randint_like randn_like zeros_like _has_compatible_shallow_copy_type _is_alias_of "
    "_is_view is_inference is_same_size __len__ __repr__ __format__".split()
)
# Their result is a view, or a copy on another device or in another dtype: it has no values either.
_VIEWS = frozenset(
    "as_strided chunk cpu bfloat16 cuda detach double expand expand_as flatten float half movedim "
    "narrow permute reshape select split squeeze storage swapaxes t to transpose type type_as "
    "unbind unflatten unsqueeze untyped_storage view view_as __getitem__".split()
)
# What functions that save a state dict ask of its tensors first.
_SAVING = frozenset(("storage", "untyped_storage", "__reduce_ex__"))
_VIEW_PROPERTIES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
_SET_DATA: Any = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]


def _name(func: Callable) -> str:
    """The name of a function or property, as `__torch_function__` gets it."""
    owner = getattr(func, "__self__", None) if _is_property(func) else func
    return getattr(owner, "__name__", "")


def _is_property(func: Callable) -> bool:
    return getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")


# For each access of an attribute torch makes an object of its own, equal to the last one.
@lru_cache(1024)
def needs_values(func: Callable) -> bool:
    """Whether `func`, as `__torch_function__` gets it, reads its arguments' values, not only their
    shape and dtype.
    """
    if _is_property(func):
        return func.__name__ == "__get__" and _name(func) in _VIEW_PROPERTIES
    return _name(func) not in _WITHOUT_VALUES


def _gives_view(func: Callable) -> bool:
    return _name(func) in (_VIEW_PROPERTIES if _is_property(func) else _VIEWS)


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


def _without_values(nest: object) -> Iterator[PlaceholderView | ShardedParameter]:
    kinds = (PlaceholderView, ShardedParameter)
    return (leaf for leaf in tree_leaves(nest) if isinstance(leaf, kinds))


def _refuse_access(func: Callable, args: tuple, kwargs: dict) -> NoReturn:
    """Raise UsageError: `func` reads or writes values that are not there."""
    writes = next(_without_values(written_by(func, args, kwargs)), None) is not None
    leaf = next(_without_values((args, kwargs)), None)
    group = None if leaf is None else owner_of(getattr(leaf, "param", leaf))
    name = "" if leaf is None else leaf.param_name
    act, context = ("write to", ", modifier_rank=0") if writes else ("read", "")
    remedy = f"{act.split()[0]} them inside of `with zero.GatheredParameters(param{context}):`"
    remedy += ", which all ranks enter"
    if _name(func) in _SAVING:
        remedy = (
            "save the model by engine.save_16bit_model or the Trainer's save_model, or call "
            "save_pretrained(folder, state_dict=accelerator.get_state_dict(engine)), on all ranks"
        )
    elif group is not None and group.read_hook is None:
        remedy += (
            ". A model that was made in zero.Init runs on an engine: give it to zero.initialize, a "
            "frozen one without an optimizer"
        )
    raise UsageError(
        f"{_name(func)} would {act} the values of parameter {name!r}, which is sharded over the "
        f"ranks here: {remedy}"
    )


def _repr(self: PlaceholderView | ShardedParameter, *, tensor_contents: object = None) -> str:
    """Without values, because those of an integer placeholder would look like weights."""
    return (
        f"{type(self).__name__}({self.param_name!r}, sharded over the ranks, "
        f"shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"
    )


class PlaceholderView(torch.Tensor):
    """A view of a placeholder, such as `param.data` or `param.detach()` of a sharded parameter.

    It has the shape, dtype and device, and no values: to read or write them is an error that names
    the parameter. Views and copies of it are such views, too.

    Attributes:
        param: the parameter of which this is a view.
        param_name: its name.
        values_for_caller: gives a view's values to code that is known to read the same ones on all
            ranks, at the same time; None to any other code.
        made_by: the function that has made the view, and its arguments, where `Init` needs to make
            it again.
    """

    param: nn.Parameter
    param_name: str
    values_for_caller: ClassVar[Callable[[PlaceholderView], torch.Tensor | None] | None] = None
    made_by: tuple[Callable, tuple, dict] | None = None
    __repr__ = _repr

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        views = list(_without_values((args, kwargs)))
        # transformers pads the bias of each head that is tied by 0.
        if _name(func) == "pad" and len(args) > 1 and not any(args[1]):
            return args[0]
        first = next(iter(args), None)
        saves = _name(func) in _SAVING and isinstance(first, PlaceholderView)
        if not views or saves or (needs_values(func) and not _gives_view(func)):
            if cls.values_for_caller is not None and isinstance(first, PlaceholderView):
                if (values := cls.values_for_caller(first)) is not None:
                    return func(values, *args[1:], **kwargs)
            _refuse_access(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        # `to` gives the tensor itself if it is there already.
        if not _gives_view(func) or any(result is view for view in views):
            return result

        def as_view(tensor: torch.Tensor) -> torch.Tensor:
            if local(tensor) is not tensor:  # a DTensor cannot be of another class
                tensor = placeholder(tensor.shape, tensor.dtype, tensor.device)
            view = tensor.detach().as_subclass(PlaceholderView)
            source = views[0]
            view.param = source.param if isinstance(source, PlaceholderView) else source
            view.param_name = views[0].param_name
            return view

        with torch._C.DisableTorchFunctionSubclass():
            return tree_map_only(torch.Tensor, as_view, result)


class ShardedParameter(nn.Parameter):
    """The class of a parameter while it shows no values.

    A function that needs them tells its group first.
    """

    __repr__ = _repr

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func == _SET_DATA:
            return args[0]._set_data(args[1])
        if not needs_values(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        sharded = [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedParameter)
        ]
        for param in sharded:
            group = owner_of(param)
            # Another parameter of the same group may have come first.
            if group is not None and isinstance(param, ShardedParameter):
                if group.read_hook is not None:
                    group.read_hook(param, func)
        if not any(isinstance(param, ShardedParameter) for param in sharded):
            return func(*args, **kwargs)
        return PlaceholderView.__torch_function__(func, types, args, kwargs)

    @property
    def param_name(self) -> str:
        group = owner_of(self)
        return "" if group is None else group.param_names[group.index[self]]

    def _set_data(self, value: torch.Tensor) -> None:
        """`param.data = value`. `module.to(device)` assigns what `param.to` has given, which
        changes nothing.
        """
        if value.data_ptr() == self.data_ptr() and value.dtype == self.dtype:
            return
        raise UsageError(
            f"parameter {self.param_name!r} is sharded over the ranks here, so `param.data` "
            "cannot be replaced, nor its dtype changed: copy values into it inside of "
            "`with zero.GatheredParameters(param, modifier_rank=0):`, which all ranks enter, and "
            "change dtypes before zero.initialize; in place of the Trainer's bf16_full_eval and "
            "fp16_full_eval, enable bf16 or fp16 in the configuration"
        )

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        """An ordinary parameter with the values, or a tensor of another class with its attributes.

        Its group is unsharded for that, so all ranks must make the same copy.
        """
        group = owner_of(self)
        assert group is not None
        with group.unsharded():
            values = self.data.clone()
        kind = plain_class(self)
        if type(values) is not torch.Tensor or kind is nn.Parameter:
            memo[id(self)] = nn.Parameter(values, self.requires_grad)
        else:
            memo[id(self)] = torch.Tensor._make_subclass(kind, values, self.requires_grad)
            own = {name: value for name, value in vars(self).items() if name != "_zero_group"}
            vars(memo[id(self)]).update(copy.deepcopy(own, memo))
        return memo[id(self)]


def plain_class(tensor: torch.Tensor) -> type:
    """The class that `tensor` has while it shows its values."""
    kind = type(tensor)
    return kind.__bases__[-1] if issubclass(kind, ShardedParameter) else kind


@cache
def _sharded_class(plain: type) -> type:
    """Its name is that of `plain`, because PEFT and transformers ask for the name "Params4bit"."""
    if plain is nn.Parameter:
        return ShardedParameter
    return type(plain.__name__, (ShardedParameter, plain), {})


def show(param: torch.Tensor, values: torch.Tensor) -> None:
    """Make `values` (the shape of the parameter, or of its local part) what `param` shows."""
    param.__class__ = plain_class(param)
    if local(param) is param:
        param.data = values
    else:
        # Autograd must not take a later all-gather for a change of what `to_local()` has given:
        # `.data` is not a view. (A slot of DTensor's class: not in `vars(param)`.)
        param._local_tensor = values.data  # pyright: ignore[reportAttributeAccessIssue]


def take_over(param: torch.Tensor, nan: torch.Tensor) -> None:
    """Make an ordinary parameter, whatever device it is on, show the placeholder `nan`.

    It must not be in any graph.
    """
    fits = torch._has_compatible_shallow_copy_type(param, nan) and not param.is_inference()
    if local(param) is param and not fits:
        # `param.data` cannot change to a device that torch does not have itself (PrivateUse1), and
        # a tensor of the inference mode counts no writes. The object stays.
        fresh = torch.Tensor._make_subclass(type(param), nan, param.requires_grad)
        vars(fresh).update(vars(param))
        torch.utils.swap_tensors(param, fresh)
    show(param, nan)


def hide(param: torch.Tensor, nan: torch.Tensor) -> None:
    """Make `param` show the placeholder `nan`, and detect reads of it."""
    show(param, nan)
    param.__class__ = _sharded_class(type(param))
