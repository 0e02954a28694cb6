"""Training checkpoints: the functions that scripts and the engine call.

Each module describes what it does.
"""

from zero.checkpoint.background import check_background_save, wait_for_background_saves
from zero.checkpoint.models import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zero.checkpoint.resumable import find_resumable
from zero.checkpoint.training import load_checkpoint, save_checkpoint

__all__ = [
    "check_background_save",
    "find_resumable",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "save_checkpoint",
    "wait_for_background_saves",
]
