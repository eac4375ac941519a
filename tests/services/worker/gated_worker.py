"""A worker process for tests: `gated_worker.py FOLDER OPTIONS_JSON`. While FOLDER/armed exists, each forward pass writes a byte to
FOLDER/started and waits for one from FOLDER/go; with a third argument, loading does too. OPTIONS override the WorkerConfig."""

import json
import sys
from pathlib import Path

import torch

from model_worker.batch import Batch
from model_worker.engine import Engine
from model_worker.kv_pool import KVPool
from model_worker.models.deterministic import DeterministicLM
from services.worker.config import WorkerConfig
from services.worker.loading import load_engine
from services.worker.main import run
from services.worker.rank_processes import RankProcesses


def wait_at_gate(folder: Path) -> None:
    if (folder / "armed").exists():
        with (folder / "started").open("wb") as started:
            started.write(b"s")
        with (folder / "go").open("rb", buffering=0) as go:
            go.read(1)


class GatedLM(DeterministicLM):
    """A deterministic model that waits at a gate."""

    folder: Path

    def forward(self, batch: Batch, kv: KVPool) -> torch.Tensor:
        wait_at_gate(self.folder)
        return super().forward(batch, kv)


def load(config: WorkerConfig, ranks: RankProcesses) -> Engine:
    if len(sys.argv) > 3:
        wait_at_gate(Path(sys.argv[1]))
    engine = load_engine(config, ranks)
    model = GatedLM(engine._model.config)
    model.folder = Path(sys.argv[1])
    engine._model = model
    return engine


if __name__ == "__main__":
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    defaults = {
        "model": "deterministic",
        "listen": "127.0.0.1:0",
        "kv_cache_bytes": 64 * 16 * 8,
        "swap_bytes": 20 * 16 * 8,
        "threads": 1,
        "heartbeat_ms": 50,
    }
    run(WorkerConfig(**defaults | options, log_level="warning", ready_file=folder / "ready.json"), load)
