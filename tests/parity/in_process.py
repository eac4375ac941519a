"""The real scheduler and the real worker engine in one process, without the wire between them."""

from collections import deque
from typing import Any

import numpy as np

from model_worker.engine import Engine
from model_worker.kv_blocks import KVBlocks
from model_worker.kv_pool import IN_FLOAT32, KVPool, KVStore
from model_worker.models.causal_lm import CausalLM
from services.scheduler.core.admission import Admitted
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.spec_stats import SpecStats
from services.worker.drafter import Drafter
from tessera.values.config import Config
from tessera.values.identity import Epoch, new_instance_id, new_request_id
from tessera.values.model import ModelInfo, WorkerDescription, WorkerLimits
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams

WORKER = "in-process"


class InProcess:
    """One scheduler and one engine with a pool of its own; two batches in flight, as between processes."""

    def __init__(
        self,
        model: CausalLM,
        info: ModelInfo,
        config: Config,
        block_size: int,
        num_blocks: int,
        drafter: Drafter | None = None,
        held: tuple[KVPool, KVBlocks] | None = None,
        store: KVStore = IN_FLOAT32,
    ) -> None:
        """`held`: a pool that is there already, and the blocks in it (over several ranks)."""
        paired = drafter.kv_shape if drafter is not None else None
        kv, blocks = held or (KVPool.of_shape(model.config.kv_shape, num_blocks, block_size, store, paired), None)
        limits = WorkerLimits(
            config.max_num_seqs, config.max_num_batched_tokens, num_speculative_tokens=config.num_speculative_tokens
        )
        proposer = drafter.proposer(kv) if drafter is not None else None
        self._begin(
            Engine(model, kv, WorkerDescription(new_instance_id(), info, kv.geometry, limits), proposer, blocks), config
        )

    @classmethod
    def of_engine(cls, engine: Engine, config: Config) -> "InProcess":
        """With an engine that is there already."""
        system = cls.__new__(cls)
        system._begin(engine, config)
        return system

    def _begin(self, engine: Engine, config: Config) -> None:
        self._engine = engine
        self._scheduler = Scheduler(config, Epoch(1, new_instance_id()))
        self._scheduler.attach_worker(WORKER, self._engine.report(1), 0)
        self._now_us = 0
        self.num_steps = 0
        self.num_cached_tokens = 0  # of all requests

    def watch(self, model: CausalLM) -> None:
        """Compute with a model around the one that it was made with."""
        self._engine._model = model

    @property
    def spec_stats(self) -> SpecStats:
        """Of all requests."""
        return self._scheduler.spec_stats

    def generate(self, prompts: list[list[int]], max_tokens: list[int], **sampling: Any) -> list[list[int]]:
        """Outputs, greedy and EOS ignored unless `sampling` says otherwise; all prompts are submitted at once, with seeds from 0 on. Every
        block is free again afterwards."""
        ids = [
            self._submit(prompt, {"seed": number, "max_tokens": count} | sampling)
            for number, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=True))
        ]
        issued = deque()
        while self._scheduler.load().num_running + self._scheduler.load().num_waiting:
            while (batch := self._scheduler.schedule(WORKER, self._tick())) is not None:
                issued.append(batch)
            self._scheduler.postprocess(WORKER, self._engine.execute(issued.popleft()), self._tick())
            self.num_steps += 1
        for batch in issued:
            self._scheduler.postprocess(WORKER, self._engine.execute(batch), self._tick())
        sequences = [self._scheduler.request(request_id) for request_id in ids]
        self.num_cached_tokens += sum(sequence.num_cached_tokens for sequence in sequences)
        self._scheduler.check_integrity()
        assert self._scheduler.load().num_free_blocks == self._scheduler.load().num_blocks
        return [list(sequence.output_token_ids()) for sequence in sequences]

    def _submit(self, prompt: list[int], given: dict[str, Any]) -> bytes:
        sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | given)
        request_id = new_request_id()
        result = self._scheduler.submit(Submission(request_id, np.array(prompt, np.int32), sampling), 0, (), self._tick())
        assert isinstance(result, Admitted), result
        return request_id

    def _tick(self) -> int:
        self._now_us += 1000
        return self._now_us
