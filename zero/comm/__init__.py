"""Process groups, collectives, and what watches them; `init_distributed` is DeepSpeed's name."""

from zero.comm.world import init_distributed

__all__ = ["init_distributed"]
