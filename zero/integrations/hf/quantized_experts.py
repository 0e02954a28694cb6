"""Stores the weights of a layer's experts in bitsandbytes' 4-bit formats.

transformers keeps all experts of a layer in one 3-D parameter, but bitsandbytes packs only linear
layers. `bitsandbytes.nn.parametrize` would replace the parameter by a property of the module, which
PEFT's `target_parameters` does not find, and with which its LoRA fails in the second forward. The
parameter is therefore kept, as a tensor that holds packed values. The codes and scales are the same
as those that bitsandbytes computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zero.core.layout import packs_experts
from zero.errors import UsageError

aten = torch.ops.aten


class QuantizedExperts(torch.Tensor):
    """Packed weights of all experts of a layer. Reads give ordinary values, and `weights[i]`
    unpacks one expert. `to(dtype)` changes the dtype of the values that are read, not the codes.

    Attributes:
        packed: the 4-bit codes.
        absmax: a scale for each block of codes. With double quantization these are codes too, and
            `offset`, `nested_absmax` and `nested_code` decode them.
        quant_type: "nf4" or "fp4".
    """

    # The engine may cast it like other weights.
    keeps_codes_when_cast = True
    BLOCK, NESTED_BLOCK = 64, 256

    packed: torch.Tensor
    absmax: torch.Tensor
    quant_type: str
    __torch_function__ = cast(Any, torch._C._disabled_torch_function_impl)

    @staticmethod
    def __new__(
        cls,
        tensors: Mapping[str, torch.Tensor],
        quant_type: str,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> QuantizedExperts:
        device = tensors["packed"].device
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        vars(made).update(tensors, quant_type=quant_type)
        return made

    @classmethod
    def of(cls, values: torch.Tensor, quant_type: str, nested: bool) -> QuantizedExperts:
        """Quantize `values` as `bitsandbytes` quantizes the weight of a linear layer."""
        from bitsandbytes.functional import quantize_4bit

        packed, state = quantize_4bit(
            values.detach().contiguous(),
            blocksize=cls.BLOCK,
            quant_type=quant_type,
            compress_statistics=nested,
        )
        tensors = {"packed": packed, "absmax": state.absmax}
        if nested:
            second = cast(Any, state.state2)
            tensors |= {
                "offset": state.offset,
                "nested_absmax": second.absmax,
                "nested_code": second.code.to(packed.device),
            }
        return cls(tensors, quant_type, values.shape, values.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        names = ("packed", "absmax", "offset", "nested_absmax", "nested_code")
        return [name for name in names if name in vars(self)], self.quant_type

    @classmethod
    def __tensor_unflatten__(
        cls, tensors: Mapping[str, torch.Tensor], quant_type: str, shape: torch.Size, stride: object
    ) -> QuantizedExperts:
        return cls(tensors, quant_type, shape, torch.get_default_dtype())

    def storage(self) -> NoReturn:
        """Called when the tensor is saved, for which there is no format."""
        raise UsageError(
            "a model with experts in 4 bits cannot be saved: save its adapter, and quantize the "
            "experts again when you load the base"
        )

    def has_parts(self, number: int) -> bool:
        """Whether so many equal parts of the experts consist of whole blocks of codes."""
        return self.numel() % (number * self.BLOCK) == 0

    def part(self, index: int, number: int) -> QuantizedExperts:
        """Copy the experts of one of `number` equal parts, which read as the same values."""
        tensors = {name: getattr(self, name) for name in self.__tensor_flatten__()[0]}
        divided = ["packed", "absmax"]
        if self.has_parts(number * self.NESTED_BLOCK):
            divided.append("nested_absmax")
        else:  # two parts would share a block of scales
            tensors = {"packed": self.packed, "absmax": self._scales()}
        for name in filter(tensors.__contains__, divided):
            tensors[name] = tensors[name].chunk(number)[index].clone()
        shape = torch.Size([len(self) // number, *self.shape[1:]])
        return type(self)(tensors, self.quant_type, shape, self.dtype)

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> Any:
        tensors = {name: change(getattr(self, name)) for name in self.__tensor_flatten__()[0]}
        return type(self)(tensors, self.quant_type, self.shape, dtype)

    def _scales(self) -> torch.Tensor:
        """Return a scale in fp32 for each block of codes."""
        from bitsandbytes.functional import QuantState, dequantize_blockwise

        if "offset" not in vars(self):
            return self.absmax
        nested: Any = self
        scales = QuantState(
            nested.nested_absmax,
            code=nested.nested_code,
            blocksize=self.NESTED_BLOCK,
            dtype=torch.float32,
        )
        return dequantize_blockwise(self.absmax, scales) + nested.offset

    def _values(self, expert: int | None = None) -> torch.Tensor:
        """Return the values of one expert, or of all experts."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        shape, packed, absmax = self.shape, self.packed, self._scales()
        if expert is not None:
            shape = shape[1:]
            numel = shape.numel()
            packed = packed.narrow(0, expert * numel // 2, numel // 2)
            absmax = absmax.narrow(0, expert * numel // self.BLOCK, numel // self.BLOCK)
        state = QuantState(
            absmax, shape, blocksize=self.BLOCK, quant_type=self.quant_type, dtype=self.dtype
        )
        return dequantize_4bit(packed, state)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self = args[0]
        # Reads of a sharded tensor are detected in `__torch_function__`, which is disabled here.
        with torch._C._EnableTorchFunction():
            if func is aten.detach.default:
                return self._with(lambda tensor: tensor, self.dtype)
            if func is aten.clone.default:
                return self._with(torch.clone, self.dtype)
            if func is aten._to_copy.default:
                device = kwargs.get("device") or self.device
                return self._with(lambda each: each.to(device), kwargs.get("dtype") or self.dtype)
            if func._schema.is_mutable:
                raise UsageError(
                    f"{func} would write to experts in 4 bits, which are frozen: merge a saved "
                    "adapter into a 16-bit base"
                )
            if func is aten.select.int and args[1] == 0 and self.shape[1:].numel() % cls.BLOCK == 0:
                return self._values(args[2] % len(self))
            args = tree_map_only(cls, cls._values, args)
            kwargs = cast(dict, tree_map_only(cls, cls._values, kwargs))
        return func(*args, **kwargs)


def quantize_experts(model: nn.Module) -> None:
    """Quantize the experts of a model that transformers has loaded with
    `BitsAndBytesConfig(load_in_4bit=True)`, which does not quantize them.

    At stage 3, zero quantizes them while the model is loaded. To get the same weights elsewhere,
    such as when you evaluate with plain PEFT, call this function before you add adapters.
    """
    for module_name, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if quantizes(model, module, f"{module_name}.{name}", param):
                module._parameters[name] = quantized(model, param)


def quantizes(model: Any, module: nn.Module, name: str, param: torch.Tensor) -> bool:
    """Whether `param` of `module` in `model` should be quantized to 4 bits. This holds for the
    weights of fused experts, unless `llm_int8_skip_modules` names them.
    """
    settings: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    if not getattr(settings, "load_in_4bit", False) or param.dim() != 3:
        return False
    if isinstance(param, QuantizedExperts) or not packs_experts(module):
        return False
    from transformers.quantizers.quantizers_utils import should_convert_module

    return should_convert_module(name, settings.llm_int8_skip_modules)


def quantized(model: Any, param: torch.Tensor) -> nn.Parameter:
    """Return `param`, quantized like the linear layers of `model`."""
    settings = model.config.quantization_config
    values = QuantizedExperts.of(
        param, settings.bnb_4bit_quant_type, settings.bnb_4bit_use_double_quant
    )
    return nn.Parameter(values, requires_grad=False)
