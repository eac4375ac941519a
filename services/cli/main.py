"""`tessera`: the one command line. Each subcommand's module is imported only when it is used, so `--help` answers at once."""

import importlib

import click

from services.rpc.transport import use_one_poller

_COMMANDS = {
    "up": ("services.cli.up_command", "Run everything on this machine and ask the model a question."),
    "generate": ("services.cli.generate_command", "Send a prompt to a running gateway and stream the answer."),
    "chat": ("services.cli.chat_command", "Talk with the model behind a running gateway."),
    "admin": ("services.cli.admin_command", "See and steer a running group: its load, requests, prefix cache, workers."),
    "health": ("services.cli.health_command", "Ask one process how it is, as probes of containers do."),
    "bench": ("services.cli.bench_command", "Measure how fast running gateways answer."),
    "gateway": ("services.cli.gateway_command", "Run one gateway: the public API, text to tokens and back."),
    "scheduler": ("services.cli.scheduler_command", "Run one scheduler: every request's state, and what each step computes."),
    "worker": ("services.cli.worker_command", "Run one model worker: weights and KV cache."),
}
"""Name -> module with a click command called `command`, and its line in the overview."""


class _LazyGroup(click.Group):
    """A group that knows its commands' names and one-liners, and imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        use_one_poller()  # here: the command's module imports gRPC
        command = importlib.import_module(_COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "TESSERA", "max_content_width": 110},
)
@click.version_option(package_name="tessera-server", prog_name="tessera")
def main() -> None:
    """Serve large language models as a gateway, a scheduler and model workers that speak gRPC.

    `tessera up` runs all of them on this machine. On more than one, start each role with its own command.

    Every option can also come from the environment: `TESSERA_`, the command, the option, for example
    TESSERA_WORKER_LOG_LEVEL=debug. An option on the command line wins. Children of `tessera up` read them too.
    """


if __name__ == "__main__":
    main()
