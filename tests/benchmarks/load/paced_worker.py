"""`tessera worker`, whose deterministic model takes STEP_S for each step, whatever is in it: as one does that waits for its weights."""

import time

from torch import Tensor

from model_worker.batch import Batch
from model_worker.kv_pool import KVPool
from model_worker.models.deterministic import DeterministicLM
from services.cli.main import main
from services.worker import model_part

STEP_S = 0.02


class PacedLM(DeterministicLM):
    """A deterministic model that takes its time."""

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        """See `DeterministicLM`."""
        until_s = time.monotonic() + STEP_S
        logits = super().forward(batch, kv)
        time.sleep(max(0.0, until_s - time.monotonic()))
        return logits


if __name__ == "__main__":
    model_part.DeterministicLM = PacedLM  # type: ignore[misc]
    main()
