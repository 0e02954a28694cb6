"""Training checkpoints: the functions that scripts and the engine call.

Each module describes what it does.
"""

from typing import TYPE_CHECKING

from zero.lazy import loader

if TYPE_CHECKING:
    from zero.checkpoint.background import check_background_save as check_background_save
    from zero.checkpoint.background import wait_for_background_saves as wait_for_background_saves
    from zero.checkpoint.models import (
        get_fp32_state_dict_from_zero_checkpoint as get_fp32_state_dict_from_zero_checkpoint,
    )
    from zero.checkpoint.models import (
        load_state_dict_from_zero_checkpoint as load_state_dict_from_zero_checkpoint,
    )
    from zero.checkpoint.resumable import find_resumable as find_resumable
    from zero.checkpoint.training import load_checkpoint as load_checkpoint
    from zero.checkpoint.training import save_checkpoint as save_checkpoint

_HOMES = {
    "check_background_save": "zero.checkpoint.background",
    "find_resumable": "zero.checkpoint.resumable",
    "get_fp32_state_dict_from_zero_checkpoint": "zero.checkpoint.models",
    "load_checkpoint": "zero.checkpoint.training",
    "load_state_dict_from_zero_checkpoint": "zero.checkpoint.models",
    "save_checkpoint": "zero.checkpoint.training",
    "wait_for_background_saves": "zero.checkpoint.background",
}
__all__ = list(_HOMES)
__getattr__ = loader(__name__, _HOMES)
