"""The sections about tensor and expert parallelism."""

from typing import Annotated

from pydantic import AfterValidator

from zero.config.idle import with_idle_keys
from zero.config.keys import Count, Section, key


@with_idle_keys("tensor_parallel")
class TensorParallelConfig(Section):
    """Tensor parallelism: neighbouring processes each hold a part of every layer, and work
    together on the same batch.

    Attributes:
        autotp_size: Neighbouring processes that share each layer. 0 or 1: no tensor parallelism.
            See `docs/tensor-parallelism.md`.
            - 1: Each process has complete layers, so there is no tensor parallelism.
            - N: N neighbouring processes share each layer. See `docs/tensor-parallelism.md`.
    """

    autotp_size: Annotated[Count, AfterValidator(lambda size: size or 1)] = 1


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
