"""Training checkpoints. Each module describes what it does.

Modules that need torch, which takes seconds to import, are loaded when they are first used.
"""

from zero.checkpoint.folder import find_resumable as find_resumable
from zero.lazy import loader

__getattr__ = loader(__name__, {})
