"""The names under `deepspeed` that Hugging Face libraries, Lightning and the frameworks on top of
them import, and what stands for each of them here (counted in docs/compatibility.md, "Names").

A name that is not listed is an error that says so: a clear message is better than a stub that does
nothing. This file does not import what it lists. `finder` resolves a name when it is first used.
"""

from __future__ import annotations

import json
from pathlib import Path

from zero.errors import FOLLOWED_RELEASE

# transformers and accelerate compare the version with 0.9.3 up to 0.18.2 before they use a feature.
# This is the release whose configuration keys and call signatures zero follows; zero's own version
# is `zero.__version__`.
REPORTED_VERSION = FOLLOWED_RELEASE
MAJOR, MINOR, PATCH = map(int, REPORTED_VERSION.split("."))
GIT_HASH = "unknown"
# What a build of DeepSpeed was made for: "0.0" is a build without a device.
TORCH_INFO = dict.fromkeys(("version", "cuda_version", "nccl_version", "hip_version"), "0.0") | {
    "bf16_support": True
}
# DeepSpeed keeps smaller tensors out of files.
MIN_SWAPPABLE_BYTES = 1024**2
# The types of optimizers as DeepSpeed spells them.
ADAGRAD, ADAM, ADAMW, LAMB, LION, MUON = "adagrad", "adam", "adamw", "lamb", "lion", "muon"

_FOLDER = Path(__file__).parent

# A line without indentation of `names.txt` has DeepSpeed's module, the module here, and the names.
# `new=old`: the name is `new` in DeepSpeed's module and `old` in the module here. A module that
# begins with a dot is one of `zero.integrations.deepspeed`. `*` stands for all other names of the
# module here. With `!` in place of a module, the names can be imported, as frameworks do whether or
# not they use them, and to call them is an error that says what to use instead.
_TABLE = _FOLDER.joinpath("names.txt").read_text("utf-8")

# What to use in place of names that zero does not have. The first entry counts that is a part of
# the full name, in small letters.
_INSTEAD: dict[str, str] = json.loads(_FOLDER.joinpath("instead.json").read_text("utf-8"))
_ELSEWHERE = "see docs/compatibility.md, Names, and docs/migration.md, Not available"


def instead_of(full_name: str, otherwise: str = _ELSEWHERE) -> str:
    """What to use in place of a name that zero does not have, to follow a message."""
    name = full_name.lower()
    return next((text for part, text in _INSTEAD.items() if part in name), otherwise)


def _read_table() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for line in _TABLE.strip().replace("\n    ", " ").splitlines():
        module, home, *names = line.split()
        home = f"zero.integrations.deepspeed{home}" if home.startswith(".") else home
        for name in names:
            new, _, old = name.partition("=")
            place = f"{home}:{old or new}" if home != "!" else home
            found.setdefault(module, {})[new] = home if name == "*" else place
        while module := module.rpartition(".")[0]:  # its packages are modules too
            found.setdefault(module, {})
    return found


# By DeepSpeed's module and name: "module:attribute" here, or "!"; by `*`: the module here that has
# all other names.
NAMES = _read_table()
