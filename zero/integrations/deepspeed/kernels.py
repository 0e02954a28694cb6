"""DeepSpeed's builders of kernels, for scripts that ask for a kernel or compile it before a run.

zero has one kernel, Adam's on host memory. The other optimizers are torch's operations, and files
are read and written without one."""

from __future__ import annotations

from zero.optim import adam_cpu


class OpBuilder:
    """A kernel by DeepSpeed's name, `NAME`."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether this machine can run what has this name."""
        return True

    def load(self, verbose: bool = True) -> None:
        """Compile the kernel, if it is one, so that no run has to wait for it."""
        if self.NAME == CPUAdamBuilder.NAME:
            adam_cpu.is_compiled()


class CPUAdamBuilder(OpBuilder):
    """The builder of Adam on host memory."""

    NAME = "cpu_adam"


_OTHERS = {
    "AsyncIOBuilder": "async_io",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPULionBuilder": "cpu_lion",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
}
globals().update({name: type(name, (OpBuilder,), {"NAME": op}) for name, op in _OTHERS.items()})
# By name, whether it can be used.
COMPATIBLE = dict.fromkeys((CPUAdamBuilder.NAME, *_OTHERS.values()), True)
