"""Writes the table of state transitions into docs/states.md, as a diagram: `python -m tests.state_diagram`, or `make states`."""

import re
from pathlib import Path

from services.scheduler.core.sequence_status import ALLOWED_TRANSITIONS, SequenceStatus

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "states.md"


def diagram() -> str:
    """The table as a mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {SequenceStatus.WAITING.name}: submitted, or recovered"]
    for status, following in ALLOWED_TRANSITIONS.items():
        lines += [f"    {status.name} --> {other.name}: {cause}" for other, cause in following.items()]
    lines += [f"    {status.name} --> [*]: forgotten" for status in SequenceStatus if status.has_ended]
    return "\n".join(lines)


def with_diagram(text: str) -> str:
    """The document with its one diagram made anew."""
    text, count = re.subn(r"```mermaid\n.*?```", lambda _: f"```mermaid\n{diagram()}\n```", text, flags=re.DOTALL)
    assert count == 1, f"{count} diagrams in {DOCUMENT}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_diagram(DOCUMENT.read_text()))
