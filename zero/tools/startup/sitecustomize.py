"""Python runs this file at its start where PYTHONPATH has this folder.

`zero verify`, `zero trace` and `zero memory` put it there for the processes of the user's command,
so that the recorder that they name is set up as soon as such a process imports zero. A process
that never imports zero records nothing. If this file hides another `sitecustomize`, that one is run
as well.
"""

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

FOLDER = os.path.dirname(os.path.realpath(__file__))
PACKAGE = os.path.dirname(os.path.dirname(FOLDER))


class RecorderFinder:
    """Waits on `sys.meta_path` for the import of zero, and leaves it then.

    A search alone, such as that of `python -m zero`, must find zero as well, and imports nothing.
    """

    is_searching = False

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if fullname != "zero" or self.is_searching:
            return None
        self.is_searching = True
        spec = importlib.util.find_spec(fullname)
        self.is_searching = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_record(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            execute(module)
            importlib.import_module(os.environ["ZERO_RECORDER"]).set_up()

        spec.loader.exec_module = execute_and_record
        return spec


def run_hidden_sitecustomize() -> None:
    # Those in the package are this file and the one of `zero run`, which has run it.
    elsewhere = [folder for folder in sys.path if not os.path.realpath(folder).startswith(PACKAGE)]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, RecorderFinder())
run_hidden_sitecustomize()
