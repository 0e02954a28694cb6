"""The sections about tensor and expert parallelism."""

from typing import Annotated

from pydantic import AfterValidator

from zero.config.idle import with_idle_keys
from zero.config.keys import Count, Section, key


@with_idle_keys("tensor_parallel")
class TensorParallelConfig(Section):
    """Tensor parallelism: neighbouring processes have a part of each layer, and work on the same
    batch.

    Attributes:
        autotp_size: Neighbouring processes that share each layer. 0 or 1: none. See
            `docs/tensor_parallelism.md`.
            - 1: Each process has whole layers: there is no tensor parallelism.
            - N: N neighbouring processes share each layer. See `docs/tensor_parallelism.md`.
    """

    autotp_size: Annotated[Count, AfterValidator(lambda size: size or 1)] = 1


@with_idle_keys("expert_parallel")
class ExpertParallelConfig(Section):
    """Expert parallelism: the processes that share layers have some of the experts each.

    Tokens travel to them.

    Attributes:
        enabled: Share the experts. See `docs/tensor_parallelism.md`.
        autoep_size: Processes that do so: as many as `tensor_parallel.autotp_size`.
    """

    enabled: bool = False
    autoep_size: Count = key(1, needs="enabled")

    @property
    def size(self) -> int:
        """Processes that share the experts of a layer; 1: none."""
        return max(1, self.autoep_size) if self.enabled else 1
