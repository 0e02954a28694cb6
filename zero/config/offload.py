"""The sections about offload and files."""

from typing import Annotated

from pydantic import AfterValidator

from zero.config.idle import with_idle_keys
from zero.config.keys import Count, Device, Fraction, Positive, Section, key


def _check_path(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"{text!r} is not a path: it contains a NUL character")
    return text


Folder = Annotated[str, AfterValidator(_check_path)]
_FILES = "device nvme"
_ACCELERATE = "accelerate's own setting"


class OffloadConfig(Section):
    """Where shards (`offload_param`), or gradients, masters and optimizer state
    (`offload_optimizer`) are kept.

    Attributes:
        device: `cpu`: host memory. `nvme`: files in `nvme_path`.
        pin_memory: Page-lock host memory, so that copies overlap with computation.
            - false: Host memory is not page-locked, so copies are slower and the GPU waits for
              them.
        nvme_path: A folder on a fast disk, which may differ between machines. It is created if it
            does not exist.
        buffer_count: This number x `buffer_size` elements are read from files before they are used.
            - N: N x `buffer_size` elements are read before they are used.
        buffer_size: See `buffer_count`.
            - N: `buffer_count` times this many elements are read before they are used.
    """

    device: Device = key("none", auto=_ACCELERATE)
    pin_memory: bool = True
    nvme_path: Folder | None = key(None, needs=_FILES, auto=_ACCELERATE)
    buffer_count: Positive = key(5, needs=_FILES)
    buffer_size: Positive = key(int(1e8), needs=_FILES, unit="elements")
    max_in_cpu: Count = key(int(1e9), needs=_FILES, unit="elements")

    def why_idle(self, name: str) -> str | None:
        if self.device == "none" and name != "device":
            return "nothing is offloaded"
        if self.device != "nvme" and self.about(name).get("needs") == _FILES:
            return f"needs {_FILES}"
        return None


class OffloadParamConfig(OffloadConfig):
    """Where the shards of the weights are kept. Only stage 3 shards the weights, so this section
    has no effect at other stages.

    Attributes:
        device: `cpu`: host memory. `nvme`: files in `nvme_path`.
            - none: The shards of the weights stay on the device.
            - cpu: On a GPU, the shards of the weights are kept in host memory.
            - nvme: The shards of the weights are kept in files in the folder `nvme_path`.
        max_in_cpu: Elements of its weights that each process keeps in host memory instead of files.
    """

    device: Device = key("none", auto=_ACCELERATE)


@with_idle_keys("zero_optimization.offload_optimizer")
class OffloadOptimizerConfig(OffloadConfig):
    """Where gradients, fp32 master weights and optimizer state are kept. It needs stage 1 or
    higher.

    Attributes:
        device: `cpu`: host memory. `nvme`: files in `nvme_path`.
            - none: Gradients, fp32 master weights and optimizer state stay on the device.
            - cpu: On a GPU, gradients, fp32 master weights and optimizer state are kept in host
              memory.
            - nvme: Gradients, fp32 master weights and optimizer state are kept in files in the
              folder `nvme_path`.
        buffer_count: This number x `buffer_size` elements are in host memory before their update,
            and until they are written.
        max_in_cpu: Elements of its gradients that each process keeps in host memory instead of
            files. Not in DeepSpeed.
        pipeline_read: Read the next sub-groups while the current one is updated, and the first ones
            during backward.
            - false: Nothing is read before it is used.
        pipeline_write: Write the previous sub-groups while the current one is updated.
            - false: A sub-group is written before the next one is updated.
        ratio: The fraction that is offloaded.
            - 1: All of the optimizer state is offloaded.
        overlap_step: Update in the background during the next forward pass. Default: true with
            `nvme`, and with `cpu` if there is a GPU. Not in DeepSpeed.
            - false: `step` returns only after the update.
    """

    device: Device = key("none", auto=_ACCELERATE)
    buffer_count: Positive = key(4, needs=_FILES)
    pipeline_read: bool = key(True, needs=_FILES)
    pipeline_write: bool = key(True, needs=_FILES)
    ratio: Fraction = 1.0
    overlap_step: bool | None = None


@with_idle_keys("aio")
class AioConfig(Section):
    """How files are read and written, if something is offloaded to `nvme`.

    Attributes:
        block_size: Bytes in each block that is read or written.
        queue_depth: Blocks that are read or written at the same time.
        thread_count: Threads that read and write.
    """

    block_size: Positive = key(1 << 20, unit="bytes")
    queue_depth: Positive = 32
    thread_count: Positive = 4
