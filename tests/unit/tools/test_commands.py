"""Every command has a help with an example; a mistake is one line and exit code 2;

`--json` prints JSON.
"""

import io
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.processes import REPOSITORY
from tests.unit.checkpoints import save
from tests.unit.integrations.test_hook import assert_refused
from zero.checkpoint.models import MAX_FILE_BYTES
from zero.tools.arguments import Parser, check_command, judged, output_file, working
from zero.tools.cli import COMMANDS, USAGE, main
from zero.tools.consolidate import DTYPES
from zero.tools.convert import WRITERS
from zero.tools.estimate.speeds import DEVICES, GIVEN
from zero.tools.launch import DEFAULT_HOSTFILE


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and f"Example: zero {command}" in text
    assert f"\n  {command} " in USAGE


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_is_one_line(command: str, capsys):
    assert_refused([command, "--no-such-option", "x"], f"zero: {command}: ", capsys)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("exlpain x.json", "unknown command 'exlpain'; did you mean explain?"),
        ("cheese", "unknown command 'cheese'; see zero --help"),
        ("--verison", "unknown option '--verison'; did you mean --version?"),
        ("estimate --ds-confg d", "estimate: unknown option --ds-confg; did you mean --ds-config?"),
        ("plan m --wrold=1", "plan: unknown option --wrold; did you mean --world?"),
        ("trace --stpe 5 x.py --ddp", "trace: unknown option --stpe; did you mean --step?"),
        ("explain -q x.json", "explain: unknown option -q; see zero explain --help"),
        ("hook x", "hook: unrecognized arguments: x; see zero hook --help"),
    ],
)  # fmt: skip
def test_a_typo_is_one_line_with_what_was_meant(line: str, said: str, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert (ended.value.code, capsys.readouterr()) == (2, ("", f"zero: {said}\n"))


def test_the_version(capsys):
    main(["--version"])
    name, number = capsys.readouterr().out.split()
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert name == "zero" and f'\nversion = "{number}"\n' in text


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with what a careless user has there."""
    monkeypatch.chdir(tmp_path)
    folders = "folder trained/checkpoint-3 trained/checkpoint-20 half/global_step5 no_json"
    for folder in folders.split():
        (tmp_path / folder).mkdir(parents=True)
    for name, text in {
        "x.py": "", "x.sh": "echo", "x.v2": "", "ok.json": '{"zero_optimization": {"stage": 3}}',
        "typo.json": '{"zero_optimisation": {}}', "half/latest": "global_step5",
        "no_json/config.json": "{", "ds_config.json": "{}", "hosts": "node1 slots=2\n",
        "wrong.yaml": "deepspeed_config: {zero_stage: 7}",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    return tmp_path


# What a user passes as a command to run, and words of the one line.
COMMANDS_OF_USERS = {
    "none.py": "none.py: no such file",
    "no-launcher x.py": "no-launcher: no such file, and no such command",
    "folder": "folder: not a file",
    "ok.json": "ok.json: neither a Python script nor",
    "x.sh": "x.sh: neither a Python script nor",
    "-m": "-m: name a module",
    "torchrun --nproc_per_node 2 none.py": "none.py: no such file",
    "x.py --deepspeed none.json": "none.json: cannot read",
    "x.py --deepspeed=typo.json": "did you mean zero_optimization",
    "x.py --deepspeed_config folder": "folder: cannot read",
    "x.py --deepspeed=": "the name of the file is empty",
}


@pytest.mark.parametrize("command", ["run", "launch", "verify", "trace"])
@pytest.mark.parametrize("given", COMMANDS_OF_USERS)
def test_a_command_that_cannot_start_is_refused_before_any_start(given, command, here, capsys):
    assert_refused([*command.split(), *given.split()], COMMANDS_OF_USERS[given], capsys)


@pytest.mark.parametrize(
    "given",
    [
        "x.py", "-m json.tool", "sh -c true.py", "torchrun -m x.py none.py", "torchrun x.py "
"none.py", "-m x", "x.v2",
        "torchrun --no-python ./x.sh none.py",
        "torchrun --nproc_per_node 2 x.py --deepspeed ok.json", "x.py --deepspeed --eval",
    ],
)  # fmt: skip
def test_a_command_that_can_start_is_not_refused(given: str, here):
    check_command("run", given.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("explain none.json", "none.json: cannot read"),
        ("doctor --folder none", "none: it is not a folder"),
        ("trace --step 0 x.py", "number above 0"),
        ("consolidate a b --max-file-size nan", "nan is not a number above 0"),
        ("trace --out x.txt x.py", "x.txt"),
        ("launch --hostfile folder x.py", "folder: no such hostfile"),
        ("launch --hostfile bytes x.py", "bytes, line 1: expected"),
        ("launch --hostfile hosts --master_port 70000 x.py", "70000 is not a port"),
        ("launch --hostfile hosts --elastic_training --min_elastic_nodes 2 x.py", "1 hosts can be"),
        ("launch torchrun x.py", "torchrun is a command, not a Python script"),
        ("launch --no_python --module x.py", "--module or --no_python, not both"),
        ("launch --bind_core_list 0 x.py", "--bind_core_list needs --bind_cores_to_rank"),
        ("launch --bind_cores_to_rank --bind_core_list 9999 x.py", "may not use core 9999"),
        ("launch --no_python x.py", "x.py: no such command, or not executable"),
        ("launch --enable_each_rank_log x.py x.py", "x.py: a file; name a folder"),
        ("launch --venv_script x x.py", "--venv_script needs --hostfile"),
        ("launch --autotuning tune x.py", "zero plan writes the fastest configuration"),
        ("launch --include node1:0 x.py", "'node1': without --hostfile, localhost"),
        ("launch --no_ssh --node_rank 1 x.py", "--node_rank 1: without --hostfile it is 0"),
        ("launch --no_ssh --hostfile hosts x.py", "--no_ssh needs --node_rank"),
        ("launch --launcher slurm --hostfile hosts x.py", "start torchrun on each machine"),
        ("trace --out none/t.json x.py", "none/t.json cannot be written: No such file"),
        ("report none --out folder", "folder is a folder"),
        ("explain bytes", "bytes: cannot read"),
        ("inspect folder", "folder: there is no checkpoint"),
        ("consolidate trained out", "name its folder, such as trained/checkpoint-20"),
        ("doctor --speeds ok.json", "ok.json: not a file of zero doctor --speeds"),
        ("explain wrong.yaml", "wrong.yaml: deepspeed_config:"),
        ("adopt half", "no checkpoint that zero can read; it has global_step5, latest"),
        ("plan folder --device-memory 1G", "ds_config.json is there already"),
        ("estimate no_json --ds-config ok.json", "config.json: not valid JSON"),
        ("x.py", "did you mean zero run x.py?"),
        ("launch", "name a script or -m MODULE"),
    ],
)
def test_bad_files_and_numbers_are_named(arguments: str, said: str, here, capsys):
    assert_refused(arguments.split(), said, capsys)


def test_nothing_is_made_by_looking_whether_a_file_can_be_written(here: Path):
    assert output_file("t.json") == Path("t.json") and not (here / "t.json").exists()


@pytest.mark.parametrize("command", ["-m job --step 3", "x.py -m --step 3"])
def test_a_command_keeps_its_own_options(command: str):
    options = Parser("trace").parse(["--step", "2", *command.split()])
    assert options.step == 2 and options.command == command.split()


def test_what_options_may_be_given_is_there():
    options = {name: about["options"] for name, about in COMMANDS.items()}
    assert options["convert"]["--to"]["choices"] == [*WRITERS]
    assert options["consolidate"]["--dtype"]["choices"] == [*DTYPES]
    assert options["consolidate"]["--max-file-size"]["default"] * 1e9 == MAX_FILE_BYTES
    assert DEFAULT_HOSTFILE in options["launch"]["-H --hostfile"]["help"]
    for name in ("estimate", "plan"):
        assert options[name]["--device"]["help"].endswith(f": {', '.join(DEVICES)}")
        assert {f"--{speed}-speed" for speed in GIVEN} <= options[name].keys()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_step_counts_its_seconds_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())

    def shown() -> str:
        return re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())  # without colours

    with working("counting [1]"):
        while "counting [1] 0:00:01" not in shown():
            time.sleep(0.01)
    assert shown().endswith("\x1b[1A\x1b[2K")  # the line is gone before the result


def test_a_long_step_prints_its_changes_to_a_file(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with working("counting") as show:
        for number in (1, 1, 2):
            show(f"step {number}")
    assert capsys.readouterr().err == "step 1\nstep 2\n"


def test_a_folder_of_checkpoints_is_listed_newest_first(tmp_path: Path, capsys):
    for step in (500, 1000):
        save(tmp_path, f"global_step{step}", global_steps=step, time=f"day {step}")
    (tmp_path / "global_step500" / "rank00000.safetensors").unlink()
    main(["inspect", str(tmp_path)])
    _, newest, older, _, last = capsys.readouterr().out.splitlines()
    place = tmp_path / "global_step1000"
    assert newest.split() == [str(place), "1000", "day", "1000", "complete"]
    assert "incomplete: " in older and older.endswith("rank00000.safetensors is missing")
    assert last == f"Look at one: zero inspect {place}"
    main(["inspect", "--json", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(each["steps"], each["complete"]) for each in found] == [(1000, True), (500, False)]


def test_folders_of_the_trainer_are_listed_too(tmp_path: Path, capsys):
    for step in (5, 10):
        folder = tmp_path / f"checkpoint-{step}"
        save(folder, f"global_step{step}", global_steps=step, world_size=2)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        main(["inspect", "--json", str(tmp_path)])  # also one alone
        found = json.loads(capsys.readouterr().out)["checkpoints"]
        assert len(found) == step // 5
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text("{")
    (tmp_path / "checkpoint-20").mkdir()
    main(["inspect", "--json", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["steps"] for each in found] == [20, 10, 5]
    assert [str(each["problem"]).partition(": ")[0] for each in found] == [
        f"{tmp_path}/checkpoint-20/checkpoint.json is missing",
        f"{tmp_path}/checkpoint-10/trainer_state.json is damaged",
        f"{tmp_path}/checkpoint-5/rng_state_0.pth is missing",
    ]


@pytest.mark.parametrize(
    ("is_terminal", "variable", "shown"),
    [(True, "", "\x1b[31mfails\x1b[0m"), (True, "1", "fails"), (False, "", "fails")],
)
def test_verdicts_have_colours_on_a_terminal_alone(is_terminal, variable, shown, monkeypatch):
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: is_terminal))
    monkeypatch.setenv("NO_COLOR", variable)
    monkeypatch.setenv("TERM", "xterm")
    assert judged("fails", False) == shown
