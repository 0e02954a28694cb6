"""Every command has a help with an example; a mistake is one line and exit code 2; `--json` prints JSON."""

from __future__ import annotations

import json

import pytest

from tests.unit.test_hook import assert_refused
from zero.__main__ import COMMANDS, USAGE, main
from zero.arguments import Parser
from zero.hf import STARTUP

# What a launched script prints is its own.
WITHOUT_JSON = {"launch"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and f"Example: zero {command}" in text
    assert ("--json" in text) == (command not in WITHOUT_JSON)
    assert f"zero {command}" in USAGE


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_is_one_line(command: str, capsys):
    assert_refused([command, "--no-such-option", "x"], f"zero: {command}: ", capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain"], ["explain", "none.json"], ["estimate"], ["estimate", "none", "--ds-config", "none.json"],
        ["estimate", "none", "--ds-config", "none.json", "--world", "0"], ["inspect"], ["inspect", "none"],
        ["consolidate"], ["consolidate", "none", "out"], ["consolidate", "a", "b", "--dtype", "int8"],
        ["doctor", "--folder", "none"], ["hook", "x"], ["launch"], ["launch", "--hostfile", "none", "x.py"],
        ["launch", "--num_gpus", "x", "x.py"], ["memory"], ["memory", "--step", "x", "x.py"], ["report"],
        ["report", "none"], ["trace"], ["trace", "--out", "x.txt", "x.py"], ["verify"], ["verify", "--steps", "0", "x"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_bad_input_is_one_line(arguments: list[str], capsys):
    assert_refused(arguments, "", capsys)


@pytest.mark.parametrize(
    "command", ["-m job --step 3", "x.py --step 3", "torchrun --nproc_per_node 2 -m job -m", "x.py -m --step 3"]
)
def test_a_command_keeps_its_own_options(command: str):
    parser = Parser("trace", "", "")
    parser.add_argument("--step", type=int)
    parser.add_command()
    options = parser.parse(["--step", "2", *command.split()])
    assert options.step == 2 and options.command == command.split()


def test_the_folder_of_the_hook_as_json(capsys):
    main(["hook", "--json"])
    assert json.loads(capsys.readouterr().out) == {"folder": STARTUP}
