"""`tessera chat` as a process, its lines from standard input."""

from collections.abc import Callable
from typing import Any

import grpc
from test_generate_command import ScriptedGateway, listening, tessera

RunAsync = Callable[..., Any]


def talk(run_async: RunAsync, gateway: ScriptedGateway, lines: str, *arguments: str) -> tuple[int, str, str]:
    async def story() -> tuple[int, str, str]:
        async with listening(gateway) as address:
            return await tessera("chat", "--gateway", address, "--resume-timeout-s", "0", *arguments, given=lines)

    result: tuple[int, str, str] = run_async(story())
    return result


def said(asked: Any) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in asked.chat.messages]


def test_every_line_goes_with_what_was_said_before(run_async: RunAsync) -> None:
    gateway = ScriptedGateway()
    lines = "What is it?\n\nAnd then?\n/reset\nHello\n"
    status, out, err = talk(run_async, gateway, lines, "--system", "Be brief.", "--temperature", "0", "--priority", "2")
    answer = "The capital is Paris."
    assert (status, out) == (0, f"{answer}\n" * 3)
    assert err.count("[stop; prompt 5 tokens, answer 3 tokens") == 3
    first, second, third = gateway.asked
    system = ("system", "Be brief.")
    assert said(first) == [system, ("user", "What is it?")]
    assert said(second) == [*said(first), ("assistant", answer), ("user", "And then?")]
    assert said(third) == [system, ("user", "Hello")]
    assert (first.sampling.temperature, first.priority) == (0, 2)


def test_an_answer_that_fails_ends_a_script(run_async: RunAsync) -> None:
    gateway = ScriptedGateway(refusal=(grpc.StatusCode.INVALID_ARGUMENT, "no"))
    status, out, err = talk(run_async, gateway, "Hi\nAgain\n")
    assert (status, out, len(gateway.asked)) == (2, "", 1)
    assert err.startswith("Error: ")
