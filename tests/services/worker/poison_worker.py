"""A worker process for tests: `poison_worker.py READY_FILE OPTIONS_JSON POISON_ID`. Its process ends at once, as by a bug in a kernel, when
it is to compute the token POISON_ID. OPTIONS override the WorkerConfig."""

import json
import os
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


class PoisonedLM(DeterministicLM):
    """A deterministic model that one token kills."""

    poison_id: int

    def forward(self, batch: Batch, kv: KVPool) -> torch.Tensor:
        if (batch.input_ids == self.poison_id).any():
            os._exit(9)
        return super().forward(batch, kv)


def load(config: WorkerConfig, ranks: RankProcesses) -> Engine:
    engine = load_engine(config, ranks)
    model = PoisonedLM(engine._model.config)
    model.poison_id = int(sys.argv[3])
    engine._model = model
    return engine


if __name__ == "__main__":
    defaults = {"model": "deterministic", "kv_cache_bytes": 256 * 16 * 8, "threads": 1, "heartbeat_ms": 100}
    run(WorkerConfig(**defaults | json.loads(sys.argv[2]), log_level="warning", ready_file=Path(sys.argv[1])), load)
