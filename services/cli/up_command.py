"""`tessera up`: everything on this machine, a question to the model, and then service until Ctrl-C."""

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click

from services.cli.answer import stream_answer, summary, write_piece
from services.cli.child import PartDied
from services.cli.config_options import Text, build_config, config_options
from services.cli.data_folder import DataFolder, DataFolderInUse
from services.cli.exit_status import INTERRUPTED
from services.cli.http_part import SmgMissing, check_installed
from services.cli.local_system import STOP_GRACE_S, PortTaken, check_listen, local_parts, local_url
from services.cli.public_access import PUBLIC_ACCESS_TEXTS
from services.cli.shared_cores import let_finish
from services.cli.speculation_texts import SPECULATION_TEXTS
from services.cli.supervisor import Supervisor
from services.cli.trace_texts import OTLP_ENDPOINT, TRACE_SAMPLE_RATIO
from services.cli.up_config import DEFAULT_LISTEN, UpConfig
from tessera.client import ChatMessage, GenerateOptions, TesseraError
from tessera.values.known_models import served_name

ANSWER_TOKENS_MAX = 128
"""Length of the answer to the one question, tokens."""

_TEXTS = {
    "model": Text("A known name, a directory (config.json, *.safetensors, tokenizer.json) or a .gguf file.", "MODEL"),
    "listen": Text("Where the gateway serves clients.", "HOST:PORT"),
    "http": Text("Serve OpenAI's and Anthropic's HTTP APIs here as well, by smg. Empty: nowhere.", "HOST:PORT"),
    "data": Text(
        "Folder for logs and the embedded Redis's file; created where missing. Delete it to forget everything.", "DIR"
    ),
    "redis_url": Text("Use this running Redis (redis://HOST:PORT/DB or unix:///PATH), start none.", "URL", name="--redis"),
    "prompt": Text("The question asked once everything runs; empty asks none.", "TEXT"),
    "once": Text("End after the answer instead of serving on."),
    "batch_invariant": Text(
        "Compute a request bit for bit the same whatever runs beside it; slower where torch computes (see docs/operations.md)."
    ),
    "tensor_parallel_size": Text("Worker processes that hold the model together, each a part of it.", "COUNT"),
    "otlp_endpoint": OTLP_ENDPOINT,
    "trace_sample_ratio": TRACE_SAMPLE_RATIO,
    **PUBLIC_ACCESS_TEXTS,
    "start_timeout_s": Text("Give up when not everything is ready after this long.", "SECONDS"),
    **SPECULATION_TEXTS,
}


@click.command("up", short_help="Run everything on this machine.")
@config_options(UpConfig, _TEXTS)
def command(**options: Any) -> None:
    """Run everything on this machine: Redis, a worker, a scheduler and a gateway, each a process of its own; with --http also smg.

    Asks the model one question through the public API, streams the answer to standard output (everything else goes
    to standard error), and serves until Ctrl-C. A process that dies later is started again.

    \b
    Examples:
      tessera up
      tessera up --http 127.0.0.1:8000
      tessera up --once --prompt "Why is the sky blue?"
      TESSERA_WORKER_KV_CACHE_BYTES=134217728 tessera up --model ./my-model --listen 0.0.0.0:8000

    \b
    Exit status: 0 after --once and its answer, or after Ctrl-C; 1 where something failed; 2 for a bad option.
    """
    config = build_config(UpConfig, options)
    try:
        if config.http:
            check_installed()
        with DataFolder(config.data.absolute()).lock():
            check_listen(config)
            sys.exit(asyncio.run(_interruptible(_System(config))))
    except TesseraError as error:
        click.echo(f"Error: the question was not answered: {error}; see the logs", err=True)
        sys.exit(1)
    except (DataFolderInUse, PortTaken, PartDied, SmgMissing) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)


class _System:
    """One run of the whole, from start to stop."""

    def __init__(self, config: UpConfig) -> None:
        self.serving = False
        self._config = config
        self._folder = DataFolder(config.data.absolute())
        self._began_s = time.monotonic()

    async def run(self) -> int:
        """Start, ask, serve, and stop however it ends; the exit status. Raises PartDied."""
        let_finish()
        parts = local_parts(self._config, self._folder)
        supervisor = Supervisor(parts, _say)
        names = ", ".join(part.name for part in reversed(parts))
        _say(f"Starting {names} with {self._config.model} (logs in {self._folder.log('*')})")
        try:
            try:
                async with asyncio.timeout(self._config.start_timeout_s):
                    await supervisor.start()
            except TimeoutError:
                raise PartDied(f"not everything was ready within {self._config.start_timeout_s:g} s; see the logs") from None
            return await self._serve(supervisor)
        finally:
            _say("Stopping")
            await supervisor.stop(STOP_GRACE_S)

    async def _serve(self, supervisor: Supervisor) -> int:
        keeper = asyncio.create_task(supervisor.keep())
        try:
            is_answered = await self._ask() if self._config.prompt else True
            self.serving = True
            if self._config.once:
                return 0 if is_answered else 1
            _say(how_to_go_on(self._config))
            await keeper
            raise AssertionError("the supervisor keeps until it fails")
        finally:
            keeper.cancel()

    async def _ask(self) -> bool:
        """Show question and answer, and how long they took; whether it is a whole answer. Raises TesseraError."""
        _say(f"\n> {self._config.prompt}")
        asked_s = time.monotonic() - self._began_s
        prompt = [ChatMessage("user", self._config.prompt)]
        options = GenerateOptions(temperature=0.0, max_tokens=ANSWER_TOKENS_MAX, timeout_s=self._config.start_timeout_s)
        answer = await stream_answer(
            self._config.listen, prompt, options, write_piece, access=self._config.public.of_question()
        )
        click.echo("")
        _say(summary(answer))
        if answer.token_ids:
            _say(f"First token {asked_s + answer.first_token_s:.1f} s after the start.")
        return answer.finish.is_whole


async def _interruptible(system: _System) -> int:
    """Run `system`; the first SIGINT, SIGTERM or SIGHUP stops it in order, the second kills what still runs."""
    work = asyncio.create_task(system.run())
    loop = asyncio.get_running_loop()
    for which in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(which, work.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        return 0 if system.serving else INTERRUPTED


def how_to_go_on(config: UpConfig) -> str:
    """What can be asked now, as lines for a shell."""
    programs = Path(sys.executable).parent
    if programs.is_relative_to(Path.cwd()):
        programs = programs.relative_to(Path.cwd())
    address = "" if config.listen == DEFAULT_LISTEN else f" --gateway {config.listen}"
    public = config.public
    return f"""
Serving on {config.listen} until Ctrl-C. In another terminal:
  {programs}/tessera generate{address}{public.generate_options()} --chat "Write a haiku about rivers."
  {programs}/buf curl --protocol grpc{public.curl_options()} -d '{{"generation": {{"text": "Once upon a time"}}}}' \\
    {public.scheme}://{config.listen}/tessera.v1.InferenceService/StreamGenerate{_how_by_http(config) if config.http else ""}"""


def _how_by_http(config: UpConfig) -> str:
    url = local_url(config.http)
    return f"""
OpenAI's and Anthropic's APIs on {url}:
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{served_name(config.model)}", "max_tokens": 100, "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'"""


def _say(line: str) -> None:
    click.echo(line, err=True)
