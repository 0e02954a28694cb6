"""Python runs this file at its start where PYTHONPATH has this folder: zero then answers to the
name `deepspeed`.

`zero run` puts the folder there for all processes that its command starts; `zero hook` prints its
name. A process that never looks for DeepSpeed imports nothing of zero. Where `zero launch
--bind_cores_to_rank` starts ranks, each is bound to its cores before torch starts threads. If this
file hides another `sitecustomize`, that one is run as well."""

import os
import sys
from importlib.machinery import PathFinder

FOLDER = os.path.dirname(os.path.realpath(__file__))
PARENT = FOLDER.rsplit(os.sep, 4)[0]  # of the package `zero`


class LazyFinder:
    """Waits on `sys.meta_path`.

    When DeepSpeed is looked for, it has zero's own finder put before itself.
    """

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "zero":  # a checkout need not be in `sys.path`
            return PathFinder.find_spec(fullname, [PARENT])
        if fullname == "deepspeed" and (facade := self._facade()):
            return facade.find_spec(fullname)
        return None

    def find_distributions(self, context):
        asked = (context.name or "").lower() == "deepspeed" and context.path is sys.path
        return facade.find_distributions(context) if asked and (facade := self._facade()) else ()

    def _facade(self):
        from zero.integrations.deepspeed import finder  # here: these import torch
        from zero.integrations.hf import hook

        return None if finder.is_installed() else hook.set_up()


def bind_cores() -> None:
    """Bind this rank to its part of the cores in `ZERO_BIND_CORES` (`zero launch`)."""
    named = os.environ.get("ZERO_BIND_CORES")
    if named is None:
        return
    cores = [int(core) for core in named.split(",") if core] or sorted(os.sched_getaffinity(0))
    # For the ranks that this process starts: they see the cores to which one is bound.
    os.environ["ZERO_BIND_CORES"] = ",".join(map(str, cores))
    if "LOCAL_WORLD_SIZE" in os.environ:
        number, ranks = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        share = max(1, len(cores) // ranks)
        os.sched_setaffinity(0, [cores[(number * share + i) % len(cores)] for i in range(share)])
        os.environ["OMP_NUM_THREADS"] = str(share)


def run_hidden_sitecustomize() -> None:
    elsewhere = [folder for folder in sys.path if os.path.realpath(folder) != FOLDER]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        # here: most machines have no other sitecustomize
        from importlib.util import module_from_spec

        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, LazyFinder())
run_hidden_sitecustomize()
bind_cores()
