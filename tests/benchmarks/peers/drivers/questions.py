"""The conversation of a driver with the benchmark that started it: standard library only, because it runs in the engine's environment.

One line of JSON in, `{"prompts": [[id, ...], ...], "output_tokens": n}`; one out: for each prompt when it was submitted and when each of its
tokens came, in seconds of one clock. The first line out says which version it is. What libraries print goes to the log.
"""

import json
import os
import sys
from collections.abc import Callable

Timeline = tuple[float, list[float]]
"""When a prompt was submitted, and when each token came."""

Run = Callable[[list[list[int]], int], list[Timeline]]


def answer_questions(load: Callable[[], tuple[str, Run]]) -> None:
    """Load the engine, then answer until the input ends. `load` returns its version and what runs prompts."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the log has what was said before an end by force
    version, run = load()
    answers.write(json.dumps({"version": version}) + "\n")
    for line in sys.stdin:
        question = json.loads(line)
        answers.write(json.dumps(run(question["prompts"], question["output_tokens"])) + "\n")
