"""Operators at a live system: what they see, what they end, a pause, a drained worker, and prefixes that no takeover brings back."""

from pathlib import Path

import grpc
import pytest
from process_stack import MODEL, Stack, StackOptions
from stream_reader import wait_until

from tessera.client import AdminClient, Client, FinishReason, NotFound, Unavailable
from tessera.client.admin import RequestState, WorkerState

TWO_SCHEDULERS = StackOptions(MODEL, f"deterministic:{MODEL}", ["--lease-ms", "1000"], schedulers=2)
PROMPT = list(range(100, 400))


def cached_of(client: Client) -> int:
    """Tokens of PROMPT that are found cached."""
    return client.generate(PROMPT, max_tokens=2, temperature=0.0).finish.usage.cached_tokens


def test_an_operator_sees_and_steers_a_live_group_across_a_takeover(tmp_path: Path) -> None:
    with Stack(tmp_path, TWO_SCHEDULERS) as stack, Client(stack.address) as client, AdminClient(stack.address) as admin:
        assert (cached_of(client), cached_of(client)) == (0, 288)
        stats = admin.stats()
        (worker,) = stats.load.workers
        assert (worker.address, worker.state, stats.durable) == (stack.worker.address, WorkerState.SERVING, True)

        running = client.stream([7, 8, 9], request_id="mine", max_tokens=4000, ignore_eos=True)
        next(running)
        (listed,) = admin.requests()
        assert (listed.client_request_id, listed.state, listed.prompt_tokens) == ("mine", RequestState.RUNNING, 3)
        assert admin.abort(listed.id) == 1
        assert list(running)[-1].finish.reason is FinishReason.ABORTED
        with pytest.raises(NotFound):
            admin.abort(listed.id)

        admin.pause_admission()
        with Client(stack.address, resume_timeout_s=1.5) as hasty, pytest.raises(Unavailable) as refused:
            hasty.generate("Hello", max_tokens=1)  # tries again after a second
        assert refused.value.details.reason == "ADMISSION_PAUSED"
        admin.resume_admission()

        assert admin.drain_worker(worker.address) == 0
        wait_until(lambda: admin.stats().load.workers[0].state is WorkerState.DRAINED, "no drained worker")
        admin.undrain_worker(worker.address)

        assert admin.reset_prefix_cache().num_forgotten_blocks > 0
        leader = stack.leader()
        assert leader is not None
        leader.kill()
        wait_until(lambda: stack.leader() is not None, "no leader")
        assert (cached_of(client), cached_of(client)) == (0, 288)
        assert admin.stats().epoch > stats.epoch
        with pytest.raises(NotFound, match="elsewhere") as unknown:
            admin.drain_worker("elsewhere")
        assert unknown.value.code is grpc.StatusCode.NOT_FOUND
