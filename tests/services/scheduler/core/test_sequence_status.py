"""The table of transitions, and the diagram of it in the documents."""

from services.scheduler.core.sequence_status import ALLOWED_TRANSITIONS, SequenceStatus
from tests.state_diagram import DOCUMENT, diagram, with_diagram


def test_the_documented_diagram_is_made_from_the_table() -> None:
    text = DOCUMENT.read_text()
    assert with_diagram(text) == text, "run make states"


def test_the_diagram_names_every_transition() -> None:
    lines = diagram().splitlines()
    for status, following in ALLOWED_TRANSITIONS.items():
        assert not any(sign in cause for cause in following.values() for sign in ":;\n"), "mermaid ends a label there"
        for other in SequenceStatus:
            arrows = [line for line in lines if line.startswith(f"    {status.name} --> {other.name}:")]
            assert len(arrows) == (other in following)


def test_every_state_is_reached_and_left_until_it_ends() -> None:
    assert ALLOWED_TRANSITIONS.keys() == set(SequenceStatus)
    reached = {other for following in ALLOWED_TRANSITIONS.values() for other in following}
    assert reached == set(SequenceStatus)
    ends = {status for status in SequenceStatus if status.has_ended}
    assert ends == {SequenceStatus.FINISHED, SequenceStatus.ABORTED}
    for status in set(SequenceStatus) - ends:
        assert ends <= ALLOWED_TRANSITIONS[status].keys(), "a request can end and be aborted wherever it is"
