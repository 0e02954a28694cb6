"""`zero run` with a launcher, the folder for PYTHONPATH, and the wheel."""

import os
import shutil
import sys
import textwrap
import zipfile
from functools import partial
from pathlib import Path

import pytest

from tests.processes import REPOSITORY, Done, fork_ranks, run
from zero.integrations.hf import STARTUP
from zero.tools.cli import main

# The started processes have neither the checkout nor zero on their path.
OUTSIDE = {"PYTHONPATH": STARTUP}


def python(code: str, cwd: Path, env: dict[str, str] = OUTSIDE) -> Done:
    done = run([sys.executable, "-c", textwrap.dedent(code)], timeout=120, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return done


def test_process_that_does_not_ask_imports_nothing(tmp_path):
    python(
        """
        import importlib.metadata, sys
        names = [each.metadata["Name"] for each in importlib.metadata.distributions()]
        assert "torch" in names and "deepspeed" not in names
        assert not {"zero", "torch"} & {*sys.modules}
        """,
        tmp_path,
    )


@pytest.mark.parametrize(
    "first",
    ["importlib.util.find_spec('deepspeed').origin", "importlib.metadata.version('deepspeed')"],
)
def test_first_question_is_answered(first, tmp_path):
    """The hook answers any kind of look-up, once, although the working directory has another folder
    `zero`.
    """
    (tmp_path / "zero").mkdir()
    done = python(
        f"""
        import importlib.metadata, importlib.util, os, sys
        found = {first}
        assert sum(type(each).__name__ == "FacadeFinder" for each in sys.meta_path) == 1
        assert len([*importlib.metadata.distributions(name="deepspeed")]) == 1
        import deepspeed, zero.hf
        zero.hf.enable()
        print(found, deepspeed.__version__, zero.__file__, os.environ["WORLD_SIZE"])
        """,
        tmp_path,
    )
    assert done.stderr == ""  # nothing about another DeepSpeed
    assert done.stdout.split()[1:] == ["0.19.8", str(REPOSITORY / "zero" / "__init__.py"), "1"]


def test_hidden_sitecustomize_runs_too(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys\nprint('hello from', __file__)\nmark = 1\n", encoding="utf-8"
    )
    paths = {"PYTHONPATH": os.pathsep.join([STARTUP, str(site), STARTUP])}
    done = python(
        "import sys, sitecustomize\nprint(sitecustomize.mark, type(sys.meta_path[0]).__name__)",
        tmp_path,
        paths,
    )
    expected = f"hello from {site / 'sitecustomize.py'}\n1 LazyFinder\n"
    assert done.stdout == expected, done.stderr


def test_modules_commands_and_the_exit_code(tmp_path, capsys):
    (tmp_path / "job.py").write_text(
        "import deepspeed, sys; sys.exit(len(sys.argv) + 4)", encoding="utf-8"
    )
    zero = partial(fork_ranks, "-m", "zero", "run", nproc=0, timeout=120, imported="zero")
    assert zero("-m", "job", "a", "b", cwd=tmp_path).returncode == 7
    command = ("sh", "-c", "echo $PYTHONPATH; exit 5")
    done = zero(*command, env={"PYTHONPATH": f"{REPOSITORY}:here"})
    assert (done.returncode, done.stdout) == (5, f"{STARTUP}:{REPOSITORY}:here\n")
    main(["hook"])
    assert capsys.readouterr().out == f"{STARTUP}\n"


def test_lightning_starts_the_other_ranks_by_itself(tmp_path):
    """The variables must be gone then: with LOCAL_RANK, Lightning believes that a launcher has
    started all ranks.
    """
    (tmp_path / "lightning.py").touch()
    script = tmp_path / "script.py"
    for before, after in ("import lightning", "pass"), ("pass", "import lightning"):
        script.write_text(
            f"import os\n{before}\nimport zero.hf; zero.hf.enable()\n"
            f"assert ('LOCAL_RANK' in os.environ) is {before == 'pass'}\n{after}\n"
            "assert not {'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_PORT'} & {*os.environ}\n",
            encoding="utf-8",
        )
        done = fork_ranks(script, nproc=0, timeout=60, imported="zero")
        assert done.returncode == 0, done.stderr


def test_the_wheel_has_the_engine_and_the_applications(tmp_path):
    """And with the engine the hook, the C++ source and other data."""
    pytest.importorskip("setuptools", minversion="77")
    source, packages = tmp_path / "source", {"zero", "distill", "translation"}
    ignore = shutil.ignore_patterns("__pycache__", ".git", "output", "build", "*.egg-info")
    for name in packages:
        shutil.copytree(REPOSITORY / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = run([sys.executable, "-c", build, tmp_path], timeout=120, cwd=source)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        (scripts,) = (name for name in names if name.endswith("entry_points.txt"))
        assert b"zero = zero.tools.cli:main" in archive.read(scripts)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == packages
    files = (file for name in packages for file in (source / name).rglob("*.*"))
    kinds = {".py", ".cpp", ".jinja", ".json", ".txt"}
    assert {str(file.relative_to(source)) for file in files if file.suffix in kinds} <= names
