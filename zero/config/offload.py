"""The sections about offload and files."""

from typing import Annotated, Literal

from pydantic import AfterValidator

from zero.config.idle import with_idle_keys
from zero.config.keys import AnyCase, Count, Device, Fraction, Positive, Section, key


def _check_path(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"{text!r} is no path: it has a NUL character in it")
    return text


_FILES = "device nvme"
_ACCELERATE = "accelerate's own setting"


class OffloadConfig(Section):
    """Where shards (`offload_param`), or gradients, masters and optimizer state
    (`offload_optimizer`) live.

    Attributes:
        device: `cpu`: host memory. `nvme`: files in the folder `nvme_path`.
        pin_memory: Host memory is page-locked for the GPU. If the system's limit forbids it, one
            line says so.
            - false: Host memory is not page-locked: a GPU waits for its copies, and they are
              slower.
        nvme_path: Folder on a fast disk. It is created if it is missing. Machines may have
            different ones.
    """

    device: Device = key("none", auto=_ACCELERATE)
    pin_memory: bool = True
    nvme_path: Annotated[str, AfterValidator(_check_path)] | None = key(
        None, needs=_FILES, auto=_ACCELERATE
    )

    def why_idle(self, name: str) -> str | None:
        if self.device == "none" and name != "device":
            return "nothing is offloaded"
        if self.device != "nvme" and self.about(name).get("needs") == _FILES:
            return f"acts with {_FILES} only"
        return None


class OffloadParamConfig(OffloadConfig):
    """Where the shards of the weights live. The section acts at stage 3.

    Attributes:
        device: `cpu`: host memory. `nvme`: files in the folder `nvme_path`.
            - none: Nothing is offloaded: the shards of the weights stay on the device.
            - cpu: On a GPU, the shards of the weights live in host memory.
            - nvme: The shards of the weights live in files in the folder `nvme_path`.
        buffer_count: With `buffer_size`: their product is how many elements are read from files
            ahead of use.
            - N: N x `buffer_size` elements are read ahead of use.
        buffer_size: See `buffer_count`. In elements.
            - N: `buffer_count` times so many elements are read ahead of use.
        max_in_cpu: At most this many elements of each process stay in host memory.
    """

    device: Device = key("none", auto=_ACCELERATE)
    buffer_count: Positive = key(5, needs=_FILES)
    buffer_size: Positive = key(int(1e8), needs=_FILES, unit="elements")
    max_in_cpu: Count = key(int(1e9), needs=_FILES, unit="elements")


@with_idle_keys("zero_optimization.offload_optimizer")
class OffloadOptimizerConfig(OffloadConfig):
    """Where gradients, fp32 masters and optimizer state live.

    The section needs stage 1 or higher.

    Attributes:
        device: `cpu`: host memory. `nvme`: files in the folder `nvme_path`.
            - none: Nothing is offloaded: gradients, fp32 masters and optimizer state stay on the
              device.
            - cpu: On a GPU, gradients, fp32 masters and optimizer state live in host memory.
            - nvme: Gradients, fp32 masters and optimizer state live in files in the folder
              `nvme_path`.
        pipeline_read: Read the next sub-group while one is updated.
        pipeline_write: Write the last sub-group while the next one is updated.
        ratio: Fraction of the optimizer state that is offloaded. `"auto"` (not a value of
            DeepSpeed): offload only as much as needed to keep a tenth of device memory (at least 1
            GiB) free.
            - 1: All of the optimizer state is offloaded.
            - auto: Only as much is offloaded as needed to keep a tenth of device memory (at least 1
              GiB) free.
        overlap_step: Not a key of DeepSpeed. Run the update in a background thread during the next
            forward. Default: true with `nvme`, and with `cpu` if there is a GPU.
            - false: `step` returns after the update.
    """

    device: Device = key("none", auto=_ACCELERATE)
    pipeline_read: bool = key(False, needs=_FILES)
    pipeline_write: bool = key(False, needs=_FILES)
    ratio: Fraction | Annotated[Literal["auto"], AnyCase()] = 1.0
    overlap_step: bool | None = None


@with_idle_keys("aio")
class AioConfig(Section):
    """How files are read and written. The section acts if something is offloaded to `nvme`.

    Attributes:
        block_size: Bytes of one block.
        queue_depth: Blocks that are read or written at the same time.
        thread_count: Threads that read and write.
    """

    block_size: Positive = key(1 << 20, unit="bytes")
    queue_depth: Positive = 32
    thread_count: Positive = 4
