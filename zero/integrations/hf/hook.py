"""`enable()` makes transformers and accelerate find zero where they look for DeepSpeed.

It sets up the process: environment variables, the import hook, the handling of exceptions. It knows
nothing about the engine."""

from __future__ import annotations

import importlib.metadata
import os
import sys

from zero.comm import world
from zero.device import accelerator
from zero.errors import UsageError, end_process_on_exception
from zero.integrations.deepspeed import finder, labels, weight_sync
from zero.integrations.hf.quantized_loading import shard_quantized_models
from zero.integrations.hf.resume import guard_checkpoints

# These modules look for DeepSpeed while they are imported, and keep the result.
_ASK_AT_IMPORT = ("transformers.integrations.deepspeed", "accelerate.accelerator")
_LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}


def enable() -> None:
    """Make `import deepspeed` import zero in this process, so that transformers, accelerate and
    other libraries use zero where they would use DeepSpeed.

    Call it before you import transformers or accelerate. A second call does nothing. It also

    - sets the variables that a launcher would set, if the script was started by plain `python`, so
      that the script trains as the only rank. (Not in a script that imports Lightning, which starts
      the other ranks itself);
    - makes accelerate use the CPU on a machine without a CUDA device;
    - moves incomplete checkpoints of a killed run out of the way before transformers looks for the
      last one;
    - ends the process when an exception reaches the top of its main thread in a job of several
      ranks, so that the launcher stops the others. If several ranks fail, only one of them prints
      its exception.

    Raises:
        RuntimeError: if it is called too late, after transformers' or accelerate's integration or
            the real DeepSpeed was imported.
        ValueError: if `ACCELERATE_USE_CPU` is set on a machine with a GPU.
    """
    if finder.is_installed():
        return
    if finder.PACKAGE in sys.modules:
        call = "call zero.hf.enable() before anything imports it"
        raise RuntimeError(f"the real deepspeed is already imported: {call}")
    imported = [name for name in _ASK_AT_IMPORT if name in sys.modules]
    if imported:
        raise RuntimeError(
            f"{' and '.join(imported)} already imported, and looked for deepspeed at that time: "
            "call zero.hf.enable() before importing transformers or accelerate, or start the "
            "script with `python -m zero run SCRIPT.py`"
        )
    set_up()


def set_up() -> finder.FacadeFinder:
    """Do what `enable` says.

    `startup/sitecustomize.py` calls this when DeepSpeed is looked for the first time.
    """
    _let_accelerate_use_plugin()
    launched = {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & {*os.environ}
    if not launched and not _LIGHTNING & {*sys.modules}:
        sys.meta_path.insert(0, _WorldOfOne(world.become_world_of_one()))
    _say_if_the_real_one_is_installed()
    installed = finder.install()
    labels.register()
    weight_sync.register()
    guard_checkpoints()
    shard_quantized_models()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        end_process_on_exception()
    return installed


class _WorldOfOne:
    """Removes the variables when Lightning is imported: with them, Lightning would not start the
    other ranks.
    """

    def __init__(self, variables: list[str]):
        self.variables = variables

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in _LIGHTNING and not world.is_initialized():
            for name in self.variables:
                os.environ.pop(name, None)


def _let_accelerate_use_plugin() -> None:
    """Have accelerate train with DeepSpeed's plugin, on the CPU too."""
    given = os.environ.get("ACCELERATE_USE_CPU", "").lower()
    if accelerator() is None:
        # With this variable accelerate would ignore its DeepSpeed plugin, and wrap the model in DDP
        # instead.
        os.environ.pop("ACCELERATE_USE_CPU", None)
    elif given in ("1", "true", "t", "yes", "y", "on"):
        raise UsageError(
            "ACCELERATE_USE_CPU makes accelerate train without DeepSpeed: unset it, and to train "
            'on the CPU of a machine with GPUs set CUDA_VISIBLE_DEVICES="" instead'
        )


def _say_if_the_real_one_is_installed() -> None:
    # A search in named folders finds only installed packages, not zero under DeepSpeed's name.
    installed = list(importlib.metadata.distributions(name=finder.PACKAGE, path=list(sys.path)))
    if installed and os.environ.get("RANK", "0") == "0":
        version = installed[0].version
        text = f"zero: DeepSpeed {version} is installed too; this run uses zero instead"
        print(text, file=sys.stderr)
