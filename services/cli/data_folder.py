"""The folder of one installation: everything that `tessera up` writes, held by one process at a time."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO


class DataFolderInUse(Exception):
    """Another running `tessera up` holds the folder; the message names it."""


@dataclass(frozen=True, slots=True)
class DataFolder:
    """Paths below one folder. `redis` has the append-only file; `logs` one file per child; `run` what only a running one needs."""

    path: Path

    @property
    def redis(self) -> Path:
        """Where the embedded Redis keeps its append-only file and socket."""
        return self.path / "redis"

    def log(self, name: str) -> Path:
        """Log of the child `name`; `NAME.log.1` is the previous run's."""
        return self.path / "logs" / f"{name}.log"

    def ready_file(self, name: str) -> Path:
        """Where the child `name` says that it serves, and on which address."""
        return self.path / "run" / f"{name}.json"

    def lock(self) -> IO[str]:
        """Create the folder and hold it until the returned file is closed or this process ends. Raises DataFolderInUse."""
        for folder in (self.path, self.redis, self.path / "logs", self.path / "run"):
            folder.mkdir(parents=True, exist_ok=True)
        file = (self.path / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise DataFolderInUse(
                f"data folder {self.path} is in use by another `tessera up` (process {holder}); stop that one, or give --data another folder"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        return file
