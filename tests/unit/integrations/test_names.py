"""Names of DeepSpeed: those that frameworks use exist; those that its documentation has exist, or
say what to use instead. `deepspeed_names.txt` has them, by framework and its version or revision.
"""

from pathlib import Path

import pytest

from tests.processes import fork_ranks
from zero.integrations.deepspeed.names import instead_of

LIST = Path(__file__).with_name("deepspeed_names.txt")
# and the largest part of them that may be errors
OWN = {
    "documented by DeepSpeed 0.19.6": 0.45,
    "in __init__ of DeepSpeed 0.19.8": 0.45,
    "in packages of DeepSpeed 0.19.8": 0.7,
}
METHODS = "methods of the engine of DeepSpeed 0.19.8"
# Of the frameworks that were read, these import none: verl, sentence-transformers,
# alignment-handbook.
FIND = """
import importlib, sys, zero.hf
zero.hf.enable()
for name in sys.argv[1:]:
    found, *rest = name.split(".")
    value = importlib.import_module(found)
    for part in rest:
        found += "." + part
        try:
            value = getattr(value, part)
        except AttributeError:
            try:
                value = importlib.import_module(found)
            except ImportError as error:
                print(name, error, sep=": ")
                break
"""


def names_of() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            names = found.setdefault(line[2:], [])
        else:
            names.append(line)
    return found


@pytest.fixture(scope="module")
def missing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error of each name that is not there."""
    script = tmp_path_factory.mktemp("names") / "find.py"
    script.write_text(FIND, encoding="utf-8")
    lists = names_of()
    names = sorted({name for each in lists if each != METHODS for name in lists[each]})
    done = fork_ranks(script, *names, nproc=0, timeout=120, imported="zero")
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("framework", sorted({*names_of()} - {*OWN, METHODS}))
def test_names_that_a_framework_uses_exist(framework: str, missing: dict[str, str]) -> None:
    assert [missing[name] for name in names_of()[framework] if name in missing] == []


@pytest.mark.parametrize("own", OWN)
def test_public_names_exist_or_say_what_to_use(own: str, missing: dict[str, str]) -> None:
    names = names_of()[own]
    errors = {name: missing[name] for name in names if name in missing}
    assert len(errors) < OWN[own] * len(names)
    for name, error in errors.items():
        _, _, instead = error.partition("is not provided by zero; ")
        assert instead and instead != instead_of("nothing like it"), (name, error)
