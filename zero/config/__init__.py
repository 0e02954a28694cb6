"""The DeepSpeed configuration, read, checked and reported."""

from zero.config.loading import load_config
from zero.config.settings import (
    AioConfig,
    BF16Config,
    Config,
    FP16Config,
    LeafModuleConfig,
    OffloadConfig,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    ZeroConfig,
)

__all__ = [
    "AioConfig",
    "BF16Config",
    "Config",
    "FP16Config",
    "LeafModuleConfig",
    "OffloadConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "ZeroConfig",
    "load_config",
]
