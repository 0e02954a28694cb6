"""The sections of ``ds_config.json`` about offload and files. See :mod:`zero.config.settings`."""

from typing import Annotated, Any

from pydantic import AfterValidator

from zero.config.keys import NOT_YET, Count, Fraction, Positive, Section, acts, choice, only, unused


def _path(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"{text!r} is no path: it has a NUL character in it")
    return text


_FILES = "device nvme"


def _device(what: str) -> Any:
    return acts(
        "none",
        "`cpu`: host memory. `nvme`: files in the folder `nvme_path`.",
        auto="accelerate's own setting",
        says={
            "none": f"Nothing is offloaded: {what} stay on the device.",
            "cpu": f"On a GPU, {what} live in host memory.",
            "nvme": f"{what[0].upper()}{what[1:]} live in files in the folder `nvme_path`.",
        },
    )


class OffloadConfig(Section):
    """Where shards (`offload_param`), or gradients, masters and optimizer state
    (`offload_optimizer`) live.
    """

    device: choice("none", "cpu", "nvme") = _device("they")
    pin_memory: bool = acts(
        True,
        says={
            False: "Host memory is not page-locked: a GPU waits for its copies, and they are "
            "slower."
        },
    )
    """Host memory is page-locked for the GPU. If the system's limit forbids it, one line says so."""
    nvme_path: Annotated[str, AfterValidator(_path)] | None = acts(
        None, needs=_FILES, auto="accelerate's own setting"
    )
    """Folder on a fast disk. It is created if it is missing. Machines may have different ones."""

    def why_idle(self, key: str) -> str | None:
        if self.device == "none" and key != "device":
            return "nothing is offloaded"
        if self.device != "nvme" and self.about(key).get("needs") == _FILES:
            return f"acts with {_FILES} only"
        return super().why_idle(key)


class OffloadParamConfig(OffloadConfig):
    """Where the shards of the weights live. The section acts at stage 3."""

    device: choice("none", "cpu", "nvme") = _device("the shards of the weights")
    buffer_count: Positive = acts(
        5, needs=_FILES, says={"other": "{} x `buffer_size` elements are read ahead of use."}
    )
    """With `buffer_size`: their product is how many elements are read from files ahead of use."""
    buffer_size: Positive = acts(
        int(1e8),
        "See `buffer_count`. In elements.",
        needs=_FILES,
        unit="elements",
        says={"other": "`buffer_count` times so many elements are read ahead of use."},
    )
    max_in_cpu: Count = acts(
        int(1e9),
        "At most this many elements of each process stay in host memory.",
        needs=_FILES,
        unit="elements",
    )


class OffloadOptimizerConfig(OffloadConfig):
    """Where gradients, fp32 masters and optimizer state live.

    The section needs stage 1 or higher.
    """

    device: choice("none", "cpu", "nvme") = _device("gradients, fp32 masters and optimizer state")
    buffer_count: Positive = unused(
        4, "the engine makes as many buffers as the tensors of a tile need"
    )
    pipeline_read: bool = acts(False, "Read the next tile while one is updated.", needs=_FILES)
    pipeline_write: bool = acts(
        False, "Write the last tile while the next one is updated.", needs=_FILES
    )
    fast_init: bool = unused(False, "new moments are never written: they are holes in the file")
    ratio: Fraction | choice("auto") = acts(
        1.0,
        says={
            1.0: "All of the optimizer state is offloaded.",
            "auto": "Only as much is offloaded as needed to keep a tenth of device memory (at "
            "least 1 GiB) free.",
        },
    )
    """Fraction of the optimizer state that is offloaded. `"auto"` (not a value of DeepSpeed): offload only as much as
    needed to keep a tenth of device memory (at least 1 GiB) free."""
    overlap_step: bool | None = acts(None, says={False: "`step` returns after the update."})
    """Not a key of DeepSpeed. Run the update in a background thread during the next forward. Default: true with `nvme`,
    and with `cpu` if there is a GPU."""
    super_offload: bool = unused(False, NOT_YET)
    cpuadam_cores_perc: Fraction = unused(
        0.8, "the cores of the machine are divided among its ranks"
    )

    pipeline = property(lambda self: self.pipeline_read or self.pipeline_write)


class AioConfig(Section):
    """How files are read and written. The section acts if something is offloaded to `nvme`."""

    block_size: Positive = acts(1 << 20, "Bytes of one block.", unit="bytes")
    queue_depth: Positive = acts(32, "Blocks that are read or written at the same time.")
    thread_count: Positive = acts(4, "Threads that read and write.")
    intra_op_parallelism: Positive | None = unused(None, "threads are counted by thread_count")
    single_submit: bool = unused(False, "blocks are read and written by threads, one call for each")
    overlap_events: bool = unused(
        True, "blocks are always read and written while others are waited for"
    )
    use_gds: only(bool, False, "files are read to host memory, without GPUDirect Storage") = False
