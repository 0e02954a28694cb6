"""Reads, checks and reports the DeepSpeed configuration. It knows nothing about the engine."""

from zero.config.load import load_config as load_config
from zero.config.offload import AioConfig as AioConfig
from zero.config.offload import OffloadConfig as OffloadConfig
from zero.config.offload import OffloadOptimizerConfig as OffloadOptimizerConfig
from zero.config.offload import OffloadParamConfig as OffloadParamConfig
from zero.config.precision import BF16Config as BF16Config
from zero.config.precision import FP16Config as FP16Config
from zero.config.settings import Config as Config
from zero.config.settings import ResolvedConfig as ResolvedConfig
from zero.config.sharding import LeafModuleConfig as LeafModuleConfig
from zero.config.sharding import ZeroConfig as ZeroConfig
