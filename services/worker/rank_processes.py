"""The processes of the ranks beside this one, which is rank 0: their start, their death, their end."""

import asyncio
import multiprocessing
import os
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog

from model_worker.ranks.crew import RankLost
from model_worker.ranks.orders import send
from services import bound_process
from services.worker.config import WorkerConfig

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The first message to a rank. `store` is the file by which the ranks find each other."""

    config: WorkerConfig
    rank: int
    store: Path


class RankProcesses:
    """Ranks 1 and up of one worker; none where it has but one. They end with this process whatever ends it, since the kernel kills them then.

    Belongs to the event loop of the main thread. `lines` lead to the ranks, in their order. `lost` completes, with a RankLost, when one of
    them ends by itself, or somebody else that the worker cannot do without.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.lines: list[Connection] = []
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self._config = config
        self._folder: TemporaryDirectory[str] | None = None
        self._processes: list[asyncio.subprocess.Process] = []
        self._watches: list[asyncio.Task[None]] = []

    @property
    def store(self) -> Path:
        """The file by which the ranks find each other."""
        assert self._folder is not None
        return Path(self._folder.name) / "store"

    async def start(self) -> None:
        """Start them; each loads its part by itself."""
        if self._config.tensor_parallel_size == 1:
            return
        self._folder = TemporaryDirectory(prefix="tessera-ranks-")
        for rank in range(1, self._config.tensor_parallel_size):
            near, far = multiprocessing.Pipe()
            with far:
                program = (sys.executable, "-m", "services.worker.rank_process", str(far.fileno()))
                # Of the main thread: a rank is killed when the thread that started it ends.
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-I",
                    "-S",
                    bound_process.__file__,
                    str(os.getpid()),
                    *program,
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(far.fileno(),),
                    start_new_session=True,  # Ctrl-C is for rank 0, which ends the others once it has drained
                )
            self.lines.append(near)
            self._processes.append(process)
            self._watches.append(asyncio.create_task(self._watch(rank, process)))
            send(near, RankSetup(self._config, rank, self.store))

    async def stop(self) -> None:
        """Kill them, who hold nothing that is of use to anybody else; returns when all are gone."""
        for watch in self._watches:
            watch.cancel()
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        if self._folder is not None:
            self._folder.cleanup()

    async def _watch(self, rank: int, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        text = f"rank {rank} of {self._config.tensor_parallel_size} {how}"
        _log.error("a rank is lost", rank=rank, how=how)
        self._lose(f"{text}: no rank can do without the others")

    def lose(self, text: str) -> None:
        """Complete `lost`, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._lose, text)

    def _lose(self, text: str) -> None:
        if not self.lost.done():
            self.lost.set_exception(RankLost(text))
