"""Process groups, collectives, and the code that watches them. `init_distributed` has DeepSpeed's
name.
"""

from zero.comm.world import init_distributed

__all__ = ["init_distributed"]
