"""The sections about tensor and expert parallelism."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema, model_validator

from zero.config.idle import with_idle_keys
from zero.config.keys import AnyCase, Count, Int, Names, Section, key

_NUMBERS = {"type": "array", "items": {"type": "integer"}}


def _as_lists(shape: Any) -> Any:
    """A shape of Python tuples, as lists, which is how JSON has it."""
    return [_as_lists(part) for part in shape] if isinstance(shape, tuple | list) else shape


class LayerSpec(Section):
    """How to divide the linear layers whose weights have certain names.

    Attributes:
        patterns: Regular expressions for the beginning of a weight's name, such as
            `layers.0.up.weight`.
        partition_type: `column` divides the outputs of a layer, `row` its inputs, `skip` nothing.
        shape: `[n, -1]`: the weight consists of n equal matrices, one below the other. `[[a, a],
            -1]` gives their sizes.
        partition_dim: The dimension of `shape` that is divided.
        model_types: Only for models with one of these `config.model_type`. Empty: for all.
        gather_output: Each process gets all outputs of a layer that is divided by `column`.
        grad_allreduce: Sum the gradients of a layer that is not divided.
    """

    patterns: Names
    partition_type: Annotated[Literal["row", "column", "skip"], AnyCase()] = "column"
    shape: Annotated[
        list[Int | list[Int]] | None, BeforeValidator(_as_lists), WithJsonSchema(_NUMBERS)
    ] = None
    partition_dim: Int | None = None
    model_types: Names = []
    gather_output: bool = False
    grad_allreduce: bool = False

    @model_validator(mode="after")
    def _is_possible(self) -> "LayerSpec":
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                message = f"the pattern {pattern!r} is not a regular expression: {error}"
                raise ValueError(message) from None
        kind = self.partition_type
        if self.shape is not None and (self.packed is None or kind != "column"):
            raise ValueError(
                f"shape {self.shape} with partition_type {kind!r} is not supported, only n equal "
                "matrices, [n, -1], for columns: give the model a linear layer for each part"
            )
        if self.gather_output and (kind != "column" or self.shape is not None):
            raise ValueError("gather_output: only for partition_type 'column' without shape")
        if self.grad_allreduce and kind != "skip":
            raise ValueError("grad_allreduce: only for partition_type 'skip'")
        return self

    @property
    def packed(self) -> int | None:
        """How many matrices the weight packs; None for a `shape` that says something else."""
        number, *others = [1, -1] if self.shape is None else self.shape or [0]
        if isinstance(number, list):
            number = len(number) if len(set(number)) == 1 else 0
        return number if number > 0 and others == [-1] else None


class PartitionConfig(Section):
    """How to divide a model that has no plan of its own, or to divide it differently from its plan.

    Attributes:
        layer_specs: Objects with `patterns`, `partition_type` (`column`, `row` or `skip`) and
            others: see `docs/tensor-parallelism.md`. The first one that matches a weight's name
            applies. Layers that none matches are not divided.
        use_default_specs: Whether `preset_model` adds others.
    """

    layer_specs: list[LayerSpec] = []
    use_default_specs: bool = key(True, idle="there are no presets; name all layers in layer_specs")


@with_idle_keys("tensor_parallel")
class TensorParallelConfig(Section):
    """Tensor parallelism: neighbouring processes each hold a part of every layer, and work
    together on the same batch.

    Attributes:
        autotp_size: Neighbouring processes that share each layer. 0 or 1: no tensor parallelism.
            See `docs/tensor-parallelism.md`.
            - 1: Each process has complete layers, so there is no tensor parallelism.
            - N: N neighbouring processes share each layer. See `docs/tensor-parallelism.md`.
        partition_config: Which layers are divided, and how. Default: the model's own plan.
    """

    autotp_size: Annotated[Count, AfterValidator(lambda size: size or 1)] = 1
    partition_config: PartitionConfig | None = None


@with_idle_keys("expert_parallel")
class ExpertParallelConfig(Section):
    """Expert parallelism: each of some neighbouring processes holds a part of the experts, and each
    token is sent to the processes that hold the experts it needs.

    Attributes:
        enabled: Divide the experts over processes. See `docs/mixtures-of-experts.md`.
        autoep_size: Neighbouring processes that share the experts. With tensor parallelism, the
            same as `tensor_parallel.autotp_size`.
            - N: Each of N neighbouring processes holds 1/N of the experts of each layer.
    """

    enabled: bool = False
    autoep_size: Count = key(1, needs="enabled")

    @property
    def size(self) -> int:
        """Processes that share the experts of a layer; 1: none."""
        return max(1, self.autoep_size) if self.enabled else 1
