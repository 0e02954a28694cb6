"""Runs the Trainer's tests and the parity tests with older and newer libraries.

    python -m benchmarks.versions --json versions.json
    python -m benchmarks.versions --only oldest LLaMA-Factory
    python -m benchmarks.versions --only oldest today --inherit --few

Each corner gets its own virtual environment, in which the tests run. The table goes to
standard output, and with --json the rows to a file, which keeps those of corners that did not run.
The exit code is 1 if a test failed.

A corner needs its Python: `python3.X` on PATH, or one of pyenv's. Except for the combination that
you run this with, torch comes from PyPI, with 3 GB of CUDA's libraries. An environment is therefore
removed after its tests, unless --keep names a folder for environments.

The corner "today" has no pins: it takes what pip gives.

--inherit    takes all packages except those that the corner pins from the environment that runs
             this, which takes seconds instead of minutes. Such a corner has this Python and this
             torch, whatever it names. "today" takes only torch and what has no newer release.
--few        a minute of tests instead of all, as continuous integration runs them. The table's
             column "tests" says so.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.runner import REPOSITORY, Parser, Table, existing_folder, result_file, show

NEWEST = "newest"
# The oldest releases in `dependencies` of pyproject.toml, beside those that each corner names.
OLDEST = (
    "psutil==6.0.0",
    "pydantic==2.7.0",
    "safetensors==0.5.0",
    "xxhash==3.1.0",
    "jinja2==3.0.0",
    "rich==13.0.0",
    "datasets==4.4.2",
)
# What the tests need beside zero's own dependencies; newest releases that go with the others.
COMMON = (
    "psutil", "pydantic", "safetensors", "xxhash", "jinja2", "rich", "peft", "datasets", "babel",
    "schedulefree", "pillow", "pytest", "pytest-timeout", "hypothesis",
)  # fmt: skip

SETS = {
    "Trainer": (
        "tests/unit/test_private_names.py",
        "tests/unit/integrations",
        "tests/hf/test_configs.py",
        "tests/hf/test_trainer_optimizers.py",
        "tests/hf/test_scripts.py::test_workflows_beyond_one_training",
        "tests/hf/test_resume.py",
        "tests/hf/test_trainer_failure.py",
        "tests/hf/test_parallel.py",
    ),
    "parity": (
        "tests/parity/test_fp32.py",
        "tests/parity/test_mixed_precision.py",
        "tests/parity/test_offload.py",
        "tests/parity/test_compile.py",
        "tests/parity/test_pipeline.py",
        "tests/dist/core/test_init.py",
        "tests/dist/comm/test_hybrid.py",
    ),
}
FEW = {
    "Trainer": (
        "tests/unit/test_private_names.py",
        "tests/hf/test_configs.py",
        "tests/hf/test_scripts.py::test_workflows_beyond_one_training",
    )
}
# Of "today": whatever a new release has broken so far, and each thing that the README promises.
FEW_OF_TODAY = {
    "Trainer": (
        "tests/unit/test_private_names.py",
        "tests/unit/tools/test_estimate.py::test_an_encoder_decoder_has_activations",
        "tests/unit/tools/test_estimate.py::test_a_plan_fits_and_is_the_fastest",
        "tests/unit/tools/test_estimate_adapters.py::test_an_adapter_comes_from_pefts_file",
        "tests/unit/tools/test_explain.py::test_the_command",
        "tests/distill/test_minicodformer.py",
        "tests/hf/test_resume.py",
        "tests/hf/test_first_run.py::test_a_script_with_a_trainer",
    )
}


@dataclass(frozen=True)
class Corner:
    """A combination of releases. `pins`: requirements in pip's syntax, beside the four. A release
    that is "newest" is the newest that pip finds; then all packages are.
    """

    name: str
    python: str
    torch: str
    transformers: str
    accelerate: str
    pins: tuple[str, ...] = ()

    @property
    def has_pins(self) -> bool:
        return self.transformers != NEWEST

    def requirements(self) -> list[str]:
        if not self.has_pins:
            return ["--upgrade", "transformers", "accelerate", "trl", "torchao", *COMMON]
        named = [f"transformers=={self.transformers}", f"accelerate=={self.accelerate}"]
        return [*named, *self.pins]


CORNERS = [
    Corner("oldest of all", "3.10", "2.8.0", "4.57.6", "1.7.0", OLDEST),
    Corner("oldest", "3.11", "2.13.0", "4.57.6", "1.7.0", OLDEST),
    Corner("torch 2.9", "3.10", "2.9.1", "4.57.6", "1.7.0", OLDEST),
    Corner("5.0", "3.12", "2.10.0", "5.0.0", "1.9.0"),
    Corner("LLaMA-Factory", "3.11", "2.13.0", "5.6.0", "1.11.0", ("peft==0.18.1",)),
    Corner("axolotl", "3.11", "2.13.0", "5.16.1", "1.13.0", ("peft==0.20.0",)),
    Corner("5.17", "3.11", "2.13.0", "5.17.0", "1.14.0"),
    Corner("newest", "3.13", "2.13.0", "5.24.0", "1.15.0"),
    Corner("Python 3.14", "3.14", "2.13.0", "5.24.0", "1.15.0"),
    Corner("today", "3.13", NEWEST, NEWEST, NEWEST),
]


def find_python(release: str) -> str | None:
    """An interpreter of that release: on PATH, else pyenv's. None if there is none."""
    if platform.python_version().startswith(f"{release}."):
        return sys.executable
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = sorted(root.glob(f"versions/{release}.*/bin/python{release}"))
    return str(installed[-1]) if installed else shutil.which(f"python{release}")


def make_environment(corner: Corner, python: str, folder: Path, inherit: bool) -> str:
    """Make the corner's virtual environment in `folder`, and return its interpreter."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    interpreter = str(folder / "bin" / "python")
    wanted = corner.requirements()
    if inherit:
        site = folder / "lib" / f"python{corner.python}" / "site-packages"
        (site / "inherited.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    else:
        wanted += [f"torch=={corner.torch}", *COMMON] if corner.has_pins else ["torch"]
    command = [interpreter, "-m", "pip", "install", "--quiet", "--no-compile", *wanted]
    # Packages that are inherited, and not used, may ask for newer ones: pip only mentions it.
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL if inherit else None)
    return interpreter


def run_tests(interpreter: str, files: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Run the tests with that interpreter.

    Returns the numbers of those that passed and were skipped, and the ids of those that failed."""
    report = folder / "report.xml"
    command = [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    # Older releases warn of newer ones of others.
    command += ["-o", "filterwarnings=", "-o", "timeout=600", *files]
    start = time.monotonic()
    done = subprocess.run(command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, check=False)
    if not report.exists():
        raise RuntimeError(f"no tests ran: {' '.join(command)}\n{done.stdout[-4000:]}")
    passed, skipped, failed = 0, 0, []
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in outcomes:
            skipped += 1
        else:
            passed += 1
    report.unlink()
    if failed:
        print(done.stdout[-8000:], file=sys.stderr)
    seconds = round(time.monotonic() - start)
    return {"passed": passed, "skipped": skipped, "failed": failed, "seconds": seconds}


def run_corner(corner: Corner, folder: Path, inherit: bool, few: bool) -> dict[str, Any]:
    """The corner's row."""
    row: dict[str, Any] = {
        "corner": corner.name, "python": corner.python, "torch": corner.torch,
        "transformers": corner.transformers, "accelerate": corner.accelerate,
        "tests": " ".join(["few"] * few + ["inherited"] * inherit) or "all",
    }  # fmt: skip
    python = find_python(corner.python)
    if python is None:
        return row | {"missing": f"no Python {corner.python} on this machine"}
    interpreter = make_environment(corner, python, folder / "environment", inherit)
    row |= {name: installed(interpreter, name) for name in ("torch", "transformers", "accelerate")}
    sets = SETS if not few else FEW if corner.has_pins else FEW_OF_TODAY
    for name, files in sets.items():
        row[name] = run_tests(interpreter, files, folder)
    return row


def installed(interpreter: str, package: str) -> str:
    """The release of a package in the interpreter's environment."""
    code = f"from importlib.metadata import version; print(version({package!r}).partition('+')[0])"
    return subprocess.check_output([interpreter, "-c", code], text=True).strip()


def table(rows: list[dict[str, Any]]) -> Table:
    columns = ["corner", "python", "torch", "transformers", "accelerate", "tests"]
    lines = []
    for row in rows:
        cells = [row[column] for column in columns]
        for name in SETS:
            result = row.get(name)
            if result is None:
                cells.append(row.get("missing", ""))
                continue
            cell = f"{result['passed']} passed, {result['skipped']} skipped"
            cells.append(cell + "".join(f"; **failed** {each}" for each in result["failed"]))
        lines.append(cells)
    return Table("Tests with other releases", [*columns, *SETS], lines)


def main() -> None:
    parser = Parser(__doc__)
    names = [corner.name for corner in CORNERS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="corners to run")
    parser.add_argument("--json", type=result_file, help="a file for the rows")
    parser.add_argument("--keep", type=existing_folder, help="a folder for the environments")
    parser.add_argument("--inherit", action="store_true", help="see above")
    parser.add_argument("--few", action="store_true", help="see above")
    args = parser.parse_args()
    earlier: dict[str, dict[str, Any]] = {}
    if args.json and args.json.exists():
        earlier = {row["corner"]: row for row in json.loads(args.json.read_text(encoding="utf-8"))}
    rows = []
    for corner in CORNERS:
        if args.inherit:
            release = f"{sys.version_info.major}.{sys.version_info.minor}"
            corner = replace(corner, python=release)
        if corner.name not in args.only:
            rows += [earlier[corner.name]] if corner.name in earlier else []
            continue
        print(f"corner: {corner.name}", file=sys.stderr, flush=True)
        folder = Path(tempfile.mkdtemp(prefix="zero-versions-", dir=args.keep))
        try:
            rows.append(run_corner(corner, folder, args.inherit, args.few))
        finally:
            if not args.keep:
                shutil.rmtree(folder)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(show(table(rows)))
    sys.exit(any(row.get(name, {}).get("failed") for row in rows for name in SETS))


if __name__ == "__main__":
    main()
