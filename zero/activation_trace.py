"""What autograd saves in one forward, in bytes, found with fake tensors: they have shapes and take no memory."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_layers import GradientCheckpointingLayer

from zero.errors import UsageError

# Of a model and all that is computed with it.
FAKE = FakeTensorMode()


class Trace(NamedTuple):
    """Bytes that autograd saves in one forward: in each checkpointable block, at its input, and outside of blocks."""

    blocks: list[int]
    inputs: list[int]
    outside: int


@functools.cache
def trace(model: nn.Module, batch: int, length: int) -> Trace:
    """Run one forward with loss on `batch` sequences of `length` tokens, and as many labels."""
    positions = getattr(model.config, "max_position_embeddings", None) or length
    if length > positions:
        raise UsageError(f"--seq {length}: the model's configuration has max_position_embeddings {positions}")
    saved, handles = _Saved(model), []
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            handles.append(module.register_forward_pre_hook(saved.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(saved.leave))
    try:
        with FAKE, torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            ids = torch.zeros(batch, length, dtype=torch.long)
            model(input_ids=ids, labels=ids, use_cache=False)
    except Exception as error:  # of any kind: the forward is somebody else's
        raise UsageError(
            f"{type(model).__name__}'s forward does not run on token ids and labels alone "
            f"({' '.join(str(error).split())[:200]}): leave --batch and --seq out, then activations are not counted"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return Trace(saved.blocks, saved.inputs, saved.outside)


class _Saved:
    """Counts the bytes that autograd saves, each storage once, by the block in which they are saved."""

    def __init__(self, model: nn.Module):
        self._seen = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._kept: list[torch.Tensor] = []  # a freed storage's address could come again
        self.outside, self.blocks, self.inputs, self._inside = 0, [], [], False

    def _bytes(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return 0
        self._seen.add(storage._cdata)
        self._kept.append(tensor)
        return storage.nbytes()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._inside:
            self.blocks[-1] += self._bytes(tensor)
        else:
            self.outside += self._bytes(tensor)
        return tensor

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = [value for value in (*args, *kwargs.values()) if torch.is_tensor(value) and value.requires_grad]
        self.inputs.append(sum(value.untyped_storage().nbytes() for value in given))
        self.blocks.append(0)
        self._inside = True

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._inside = False
