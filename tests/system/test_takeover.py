"""The leading scheduler goes while another stands by: every stream goes on under that one, with the tokens of an undisturbed run.

The pauses that clients see are printed; how long they may be is for the chaos runs to say, on a machine of its own.
"""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from process_stack import MODEL, Stack, StackOptions
from role_process import RoleProcess
from stream_reader import Reader, wait_until

from tessera.client import Client

STREAMS = 24
TOKENS = 400
FROZEN_S = 10.0

PAIR = StackOptions(
    model=MODEL,
    worker_model=f"deterministic:{MODEL}",
    scheduler=["--result-retention-ms", "500", "--lease-ms", "2000", "--log-level", "debug"],
    worker=["--kv-cache-bytes", str(4 * 1024 * 1024)],
    schedulers=2,
)
"""A model whose tokens are a hash of the KV that it really reads: any wrong block shows."""


def kill(leader: RoleProcess) -> None:
    leader.kill()


def stop(leader: RoleProcess) -> None:
    """Ask it to end; it is to be gone long before its requests are."""
    assert leader.process is not None
    leader.process.send_signal(signal.SIGTERM)


def freeze(leader: RoleProcess) -> None:
    leader.freeze()


def start_all(client: Client) -> list[Reader]:
    draw = random.Random(7)
    prompts = [[draw.randrange(300, 40_000) for _ in range(draw.randrange(4, 60))] for _ in range(STREAMS)]
    return [
        Reader(client, prompt, max_tokens=TOKENS, ignore_eos=True, seed=number, temperature=0.7 * (number % 2))
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("end", "pause_s_max"), [(kill, 20.0), (stop, 15.0), (freeze, 20.0)])
def test_a_standby_goes_on_where_the_leader_was(end: Callable[[RoleProcess], None], pause_s_max: float, tmp_path: Path) -> None:
    with Stack(tmp_path, PAIR) as stack, Client(stack.address) as client:
        wait_until(lambda: stack.leader() is not None, "a scheduler leads")
        leader = stack.leader()
        assert leader is not None
        undisturbed = [reader.result() for reader in start_all(client)]
        readers = start_all(client)
        for reader in readers:
            reader.wait_tokens(20)
        began_s = time.monotonic()
        end(leader)
        taken_s = wait_until(lambda: stack.leader() not in (None, leader), "the standby leads")
        assert any(reader.finish is None for reader in readers), "it came too late to disturb anything"
        for reader, expected in zip(readers, undisturbed, strict=True):
            assert reader.result().token_ids == expected.token_ids
        pause_s = max(reader.pause_s for reader in readers)
        usual_s = max(reader.pause_s for reader in undisturbed)
        print(f"{end.__name__}: pause {pause_s:.2f} s (undisturbed {usual_s:.2f} s), led after {taken_s:.2f} s")
        assert pause_s < pause_s_max
        (join,) = [event for event in _events(stack, leader) if event["event"] == "leading"]
        assert join["adopted"], "nothing was computed any more when it came to lead"
        if leader.is_frozen:
            time.sleep(max(0.0, began_s + FROZEN_S - time.monotonic()))
        _goes_on(stack, leader, client)


def _goes_on(stack: Stack, leader: RoleProcess, client: Client) -> None:
    """The earlier leader stands by in a world that has another one, and leads when that one goes."""
    if leader.is_frozen:
        leader.thaw()
        wait_until(
            lambda: any(event["event"] == "standing by again" for event in leader.events()), "the earlier leader stands by"
        )
    elif leader.is_running:
        assert leader.process is not None and leader.process.wait(30) == 0
    if not leader.is_running:
        leader.start()
        leader.wait_ready()
        wait_until(lambda: any(event["event"] == "standing by" for event in leader.events()), "it stands by")
    present = stack.leader()
    assert present is not None and present is not leader
    present.kill()
    assert client.generate("once more", max_tokens=3, temperature=0.0).finish is not None
    assert stack.leader() is leader


def _events(stack: Stack, but: RoleProcess) -> list[dict[str, object]]:
    return [event for scheduler in stack.schedulers if scheduler is not but for event in scheduler.events()]
