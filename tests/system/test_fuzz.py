"""Random input to every public method: refused or answered, never a bug, and everything lives on. More of it: `make soak-fuzz`."""

import asyncio
from pathlib import Path

from fuzz import ENGINE_TOO, SERVICES, fuzz, served_at
from process_stack import Stack

from tessera.client import Client

INPUTS = 400


def test_no_public_input_leads_to_a_bug_or_the_end_of_a_process(tmp_path: Path) -> None:
    with Stack(tmp_path, ENGINE_TOO) as stack:
        seen, bugs = asyncio.run(fuzz(served_at(stack), INPUTS, seed=0))
        assert not bugs
        assert all(role.is_running for role in stack.roles)
        with Client(stack.address) as client:
            assert client.generate("Once upon a time", max_tokens=2).token_ids
    assert sum(seen.values()) == INPUTS
    assert {method for method, _ in seen} == {method.name for service in SERVICES for method in service.methods}
    assert sum(times for (_, status), times in seen.items() if status == "OK") > INPUTS / 10  # not all of it is nonsense
