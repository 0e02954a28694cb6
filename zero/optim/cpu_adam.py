"""The class's name until `zero.hf.names` says `zero.optim.torch_optimizers:DeepSpeedCPUAdam`."""

from zero.optim.torch_optimizers import DeepSpeedCPUAdam as CPUAdam  # noqa: F401
