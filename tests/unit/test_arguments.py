"""No function swallows keyword arguments: what it does not know is an error.

transformers 5.24 gave an argument another name. A model that took it with `**kwargs`, and did not
look at it, went on with wrong results."""

import ast
from collections.abc import Iterator

import pytest

from tests.processes import REPOSITORY
from zero.integrations.deepspeed.finder import FacadeModule
from zero.integrations.deepspeed.names import NAMES

# Functions that take any keyword arguments, because they do nothing, or because whoever calls them
# passes more than they need.
TAKE_ANY = {
    "zero/core/hooks.py": {"_do_nothing"},
    "zero/integrations/deepspeed/finder.py": {"__init__"},  # refuses to be called
    "zero/integrations/hf/preemption.py": {  # transformers calls callbacks so
        "on_train_begin", "on_step_end", "on_save", "on_train_end",
    },
    "zero/parallel/pipeline.py": {"forward"},  # takes the place of any layer
    "zero/tools/estimate/calls.py": {"lambda"},  # operations of a known number, of any options
    "zero/tools/estimate/machine.py": {"lambda"},
    "zero/tools/profile/bounded_run.py": {"_end"},
    # The engine's own run, which is compared with this one, refuses wrong arguments.
    "zero/tools/verify/plain.py": {"compile"},
    "zero/tools/verify/record.py": {"_refuse_load"},
}  # fmt: skip


def swallowing(tree: ast.AST) -> Iterator[str]:
    """The names of functions that never use the keyword arguments that they collect."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.Lambda) or function.args.kwarg is None:
            continue
        body = [function.body] if isinstance(function, ast.Lambda) else function.body
        used = {node.id for part in body for node in ast.walk(part) if isinstance(node, ast.Name)}
        if function.args.kwarg.arg not in used:
            yield "lambda" if isinstance(function, ast.Lambda) else function.name


def test_no_function_swallows_keyword_arguments() -> None:
    found = {}
    for folder in ("zero", "distill", "translation"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            if names := set(swallowing(ast.parse(path.read_text(encoding="utf-8")))):
                found[str(path.relative_to(REPOSITORY))] = names
    assert found == TAKE_ANY


ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"


@pytest.mark.parametrize(
    ("module", "name", "args"),
    [
        ("deepspeed", "init_distributed", ()),
        ("deepspeed", "tp_model_init", (None, 1)),
        ("deepspeed.comm", "init_distributed", ()),
        ("deepspeed.checkpointing", "configure", (None,)),
        ("deepspeed.runtime.config", "DeepSpeedConfig", ({},)),
        (ULYSSES, "UlyssesSPDataLoaderAdapter", ([], 0, None, 1, None)),
    ],
)
def test_deepspeeds_names_refuse_arguments_that_deepspeed_refuses(module, name, args) -> None:
    assert name in NAMES[module]
    with pytest.raises(TypeError, match="tp_gruop"):
        getattr(FacadeModule(module), name)(*args, tp_gruop=None)
