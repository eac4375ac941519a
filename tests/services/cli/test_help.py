"""Every command explains itself: all options, their defaults, an example; and the overview answers without loading a role."""

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from services.cli import main
from services.rpc.transport import EXPERIMENTS, ONE_POLLER

COMMANDS = tuple(main._COMMANDS)


def help_of(*arguments: str) -> str:
    result = CliRunner().invoke(main.main, [*arguments, "--help"])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_the_overview_has_every_command_with_its_line() -> None:
    text = help_of()
    for name, (_, line) in main._COMMANDS.items():
        assert name in text and line in text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_s_help_has_an_example_and_every_option(name: str) -> None:
    text = help_of(name)
    assert f"tessera {name}" in text.partition("Example")[2]
    command = main.main.get_command(click.Context(main.main), name)
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{parameter.name} has no help"
            assert max(parameter.opts, key=len) in text


def test_the_help_of_roles_needs_no_torch() -> None:
    check = "import sys\nfrom services.cli import {0}_command\nassert 'torch' not in sys.modules"
    for name in COMMANDS:
        subprocess.run([sys.executable, "-c", check.format(name)], check=True)


def test_the_overview_loads_no_command() -> None:
    check = "import sys\nfrom services.cli.main import main\nmain(['--help'], standalone_mode=False)\nassert 'grpc' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(("given", "chosen"), [("", ONE_POLLER), ("trace_record_callops", "trace_record_callops")])
def test_a_command_chooses_grpc_s_transport_unless_the_environment_does(given: str, chosen: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != EXPERIMENTS}
    print_it = f"import os, sys, click\nfrom services.cli import main\nmain.main.get_command(click.Context(main.main), 'generate')\nassert 'grpc' in sys.modules\nprint(os.environ['{EXPERIMENTS}'])"
    given_one = environment | ({EXPERIMENTS: given} if given else {})
    ran = subprocess.run([sys.executable, "-c", print_it], check=True, stdout=subprocess.PIPE, text=True, env=given_one)
    assert ran.stdout.strip() == chosen


def test_an_option_can_come_from_the_environment() -> None:
    result = CliRunner().invoke(main.main, ["generate", "x"], env={"TESSERA_GENERATE_MAX_TOKENS": "0"})
    assert result.exit_code == 2 and "--max-tokens" in result.output


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(main.main, ["serve"])
    assert result.exit_code == 2 and "No such command 'serve'" in result.output
