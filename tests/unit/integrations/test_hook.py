"""The import hook and the launcher.

Each test has its own process, because both change what a process imports.
"""

import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.processes import Done, fork_ranks, run, torchrun
from zero.errors import refuse
from zero.tools.cli import main


def python(code: str, tmp_path: Path, env=None, site="", error="") -> Done:
    """Run code in a process that has imported torch and zero, but nothing that looks for
    DeepSpeed. `error` is in the last line of a process that fails.
    """
    script = tmp_path / "script.py"
    first = f"import sys; sys.path.insert(0, {str(site)!r})\n" if site else ""
    script.write_text(first + textwrap.dedent(code), encoding="utf-8")
    done = fork_ranks(script, nproc=0, timeout=120, imported="zero", env=env)
    assert done.returncode == bool(error), done.stderr
    assert not error or error in done.stderr.splitlines()[-1]
    return done


@pytest.fixture
def real_deepspeed(tmp_path):
    """Return a folder with a package that looks like an installed DeepSpeed of another version."""
    site = tmp_path / "site"
    (site / "deepspeed").mkdir(parents=True)
    (site / "deepspeed" / "__init__.py").write_text("real = True\n", encoding="utf-8")
    record = site / "deepspeed-0.17.1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.17.1\n")
    return site


# -- names


def test_transformers_and_accelerate_find_it(tmp_path):
    python(
        """
        import importlib.metadata, importlib.util, os, sys
        import zero.hf
        assert importlib.util.find_spec("deepspeed") is None
        os.environ["ACCELERATE_USE_CPU"] = "true"  # it makes accelerate ignore DeepSpeed
        zero.hf.enable()
        zero.hf.enable()
        assert sum(type(finder).__name__ == "FacadeFinder" for finder in sys.meta_path) == 1
        assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
        assert importlib.metadata.version("DeepSpeed") == "0.19.8"
        assert importlib.metadata.packages_distributions()["deepspeed"] == ["deepspeed"]
        assert not list(importlib.metadata.distributions(name="deepspeed", path=[os.getcwd()]))
        from transformers import TrainingArguments
        for _ in range(2):  # with plain python the world size is 1
            config = {"zero_optimization": {"stage": 3}}
            arguments = TrainingArguments(deepspeed=config, report_to=[])
            state = arguments.distributed_state
            assert (state.backend, state.num_processes, str(state.device)) == ("gloo", 1, "cpu")
            assert state.distributed_type.name == "DEEPSPEED"
        """,
        tmp_path,
    )


def test_every_name_of_the_table_resolves(tmp_path):
    python(
        """
        import importlib, torch, zero, zero.comm.communicator, zero.hf
        from zero.integrations.deepspeed.names import NAMES
        zero.hf.enable()
        for module, names in NAMES.items():
            imported = importlib.import_module(module)
            for name in names.keys() - {"*"}:
                getattr(imported, name)
                assert name in dir(imported)
        import deepspeed
        assert issubclass(deepspeed.DeepSpeedEngine, zero.ZeroEngine)
        assert deepspeed.initialize is zero.initialize and deepspeed.zero.Init is zero.Init
        assert deepspeed.comm.all_reduce is torch.distributed.all_reduce
        import pytest
        with pytest.raises(AttributeError, match="PipelineModule' is not provided by zero; pipel"):
            deepspeed.PipelineModule
        with pytest.raises(ImportError, match="OneBitAdam' is not provided by zero; take AdamW"):
            from deepspeed.ops.adam import OneBitAdam
        """,
        tmp_path,
    )


# -- when and where


@pytest.mark.parametrize("name", ["transformers.integrations.deepspeed", "accelerate"])
def test_too_late(name, tmp_path):
    said = "before importing transformers or accelerate"
    python(f"import {name}, zero.hf; zero.hf.enable()", tmp_path, error=said)


def test_real_deepspeed_stays_unless_zero_is_asked_for(real_deepspeed, tmp_path):
    code = """
    import zero, zero.hf, importlib.metadata
    print(importlib.metadata.version("deepspeed"))
    if {enable}:
        zero.hf.enable()
    import deepspeed
    print(importlib.metadata.version("deepspeed"), hasattr(deepspeed, "real"))
    """
    without = python(code.format(enable=False), tmp_path, site=real_deepspeed)
    assert without.stdout.split() == ["0.17.1", "0.17.1", "True"], without.stderr
    assert "zero:" not in without.stderr
    asked = python(code.format(enable=True), tmp_path, site=real_deepspeed)
    assert asked.stdout.split() == ["0.17.1", "0.19.8", "False"], asked.stderr
    said = [line for line in asked.stderr.splitlines() if line.startswith("zero:")]
    assert said == ["zero: DeepSpeed 0.17.1 is installed too; this run uses zero instead"]
    other_rank = python(
        code.format(enable=True), tmp_path, {"RANK": "1", "WORLD_SIZE": "1"}, real_deepspeed
    )
    assert "zero:" not in other_rank.stderr


def test_real_deepspeed_already_imported(real_deepspeed, tmp_path):
    said = "the real deepspeed is already imported"
    python("import deepspeed, zero.hf; zero.hf.enable()", tmp_path, site=real_deepspeed, error=said)


# -- launcher


def test_run_is_as_python_would_run_it(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "beside.py").write_text("value = 1\n", encoding="utf-8")
    (folder / "script.py").write_text(
        "import sys, beside, deepspeed\n"
        "assert 'zero' in deepspeed.__doc__\n"
        "print(__name__, __file__, sys.argv, sys.path[0], sys.modules['__main__'].beside.value)\n"
    )
    arguments = ["--flag", "a b", "--deepspeed"]
    command = [sys.executable, "-m", "zero", "run", "folder/script.py", *arguments]
    ours = run(command, timeout=120, cwd=tmp_path)
    assert ours.returncode == 0, ours.stderr
    expected = f"__main__ folder/script.py {['folder/script.py', *arguments]} {folder} 1\n"
    assert ours.stdout.replace(f"{tmp_path}/folder/script.py", "folder/script.py") == expected


def test_a_mistake_in_the_script_is_one_line_that_names_the_line(tmp_path):
    script = tmp_path / "script.py"
    fault = "from zero.config import load_config\n\nload_config({'fp16': 1})\n"
    said = f"{script}, line 3: DeepSpeed configuration dict: fp16: expected an object, got 1"
    for text, code, last in ((fault, 2, said), ("raise KeyError('gone')", 1, "KeyError: 'gone'")):
        script.write_text(text, encoding="utf-8")
        done = fork_ranks("-m", "zero", "run", script, nproc=0, timeout=120, imported="zero")
        assert (done.returncode, done.stderr.splitlines()[-1]) == (code, last)


def test_ranks_with_the_same_fault_leave_it_to_the_first_to_say_so(capsys, monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for rank, said in (("0", "wrong"), ("3", "[rank 3] wrong")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            refuse("wrong")
        assert (ended.value.code, capsys.readouterr().err) == (2, said + "\n")
    assert len(waited) == 1


def test_an_exception_of_all_ranks_is_printed_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from zero.errors import end_process_on_exception\n\n"
        'end_process_on_exception()\nraise RuntimeError("the batch was cursed")\n',
        encoding="utf-8",
    )
    done = torchrun(script, nproc=2, timeout=120)
    assert done.returncode == 1 and done.stderr.count('raise RuntimeError("the b') == 1
    assert "[rank 0] RuntimeError: the batch was cursed" in done.stderr


def assert_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    stdout, stderr = capsys.readouterr()
    assert (ended.value.code, stdout) == (2, "")
    assert len(stderr.splitlines()) == 1
    assert stderr.startswith("zero: ") and said in stderr
