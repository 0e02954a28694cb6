"""The numbers of each step: loss, norm, time by phase and wait, memory, communication.

Measured, gathered and written.
"""

from zero.monitor.collectives import log_summary
from zero.monitor.monitor import Monitor, make

__all__ = ["Monitor", "log_summary", "make"]
