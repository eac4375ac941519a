"""Judges what clients saw of a disturbed run against an undisturbed one of the same asks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.chaos.asks import Ask
from tests.chaos.stream_log import StreamLog

COMPLAINTS_MAX = 12
"""So many wrong streams are described; all are counted."""

SameButForRounding = Callable[[Ask, Sequence[int], Sequence[int]], str]
"""(ask, expected, came) -> why the two outputs may not differ as they do; empty where they part at a near tie."""


@dataclass(slots=True)
class Verdict:
    """Counts over all streams; all but `streams`, `tokens` and `near_ties` must be 0."""

    streams: int = 0
    tokens: int = 0
    lost: int = 0  # tokens that never came: jumped over, or missing at the end
    repeated: int = 0  # tokens that came twice
    wrong: int = 0  # streams that differ from the undisturbed run in tokens, text or end
    unfinished: int = 0  # streams without exactly one end
    near_ties: int = 0  # streams that part from the undisturbed run where rounding may decide
    complaints: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost or self.repeated or self.wrong or self.unfinished)

    def complain(self, text: str) -> None:
        """Note something wrong, for people."""
        if len(self.complaints) < COMPLAINTS_MAX:
            self.complaints.append(text)


def judge(
    asks: Sequence[Ask], expected: Sequence[StreamLog], logs: Sequence[StreamLog], rounding: SameButForRounding | None
) -> Verdict:
    """`expected` are the logs of the undisturbed run, one per ask. `rounding` is None where every token must be equal."""
    verdict = Verdict(streams=len(logs))
    for log in logs:
        verdict.tokens += len(log.token_ids)
        _judge_stream(verdict, asks[log.ask], expected[log.ask], log, rounding)
    return verdict


def check_undisturbed(logs: Sequence[StreamLog]) -> None:
    """An undisturbed run must be whole before anything is compared with it."""
    verdict = Verdict()
    for log in logs:
        _judge_form(verdict, log)
    assert verdict.is_clean, f"the undisturbed run is not whole: {verdict.complaints}"


def check_stopped(ask: Ask, plain: StreamLog, stopped: StreamLog) -> None:
    """The answer to an ask with a stop string is the beginning of the answer without one, up to the string."""
    (stop,) = ask.stop
    assert stopped.stop == stop and stopped.text == plain.text[: plain.text.index(stop)], (stop, plain.text, stopped.text)
    assert stopped.token_ids == plain.token_ids[: len(stopped.token_ids)], (
        f"ask {stopped.ask}: tokens differ before the stop string"
    )


def _judge_stream(verdict: Verdict, ask: Ask, expected: StreamLog, log: StreamLog, rounding: SameButForRounding | None) -> None:
    _judge_form(verdict, log)
    if log.token_ids == expected.token_ids:
        if (log.text, log.finish, log.stop) != (expected.text, expected.finish, expected.stop) and log.finish:
            verdict.wrong += 1
            verdict.complain(
                f"ask {log.ask}: the tokens are right, but text or end is not: {log.finish} {log.stop!r} {log.text[-40:]!r} "
                f"for {expected.finish} {expected.stop!r} {expected.text[-40:]!r}"
            )
        return
    if log.token_ids == expected.token_ids[: len(log.token_ids)]:
        verdict.lost += len(expected.token_ids) - len(log.token_ids)
        verdict.complain(f"ask {log.ask}: {len(log.token_ids)} of {len(expected.token_ids)} tokens came; {_end_of(log)}")
        return
    why = "every token must be equal" if rounding is None else rounding(ask, expected.token_ids, log.token_ids)
    if why:
        verdict.wrong += 1
        verdict.complain(f"ask {log.ask}: {why}; {_difference(expected.token_ids, log.token_ids)}")
    else:
        verdict.near_ties += 1


def _judge_form(verdict: Verdict, log: StreamLog) -> None:
    """What must hold of any stream, whatever it says."""
    verdict.lost += log.skipped
    verdict.repeated += log.repeated
    if log.skipped or log.repeated:
        verdict.complain(f"ask {log.ask}: offsets are not dense, {log.skipped} tokens skipped, {log.repeated} repeated")
    if log.text_faults or log.miscounted:
        verdict.wrong += 1
        verdict.complain(f"ask {log.ask}: {log.text_faults} pieces of text out of place, usage off by {log.miscounted}")
    if log.finish in ("", "ERROR", "ABORTED") or log.error or log.pieces_after_finish:
        verdict.unfinished += 1
        verdict.complain(f"ask {log.ask}: {_end_of(log)}, {log.pieces_after_finish} pieces after the finish")


def _end_of(log: StreamLog) -> str:
    return f"finish {log.finish or 'none'}, error {log.error or 'none'}"


def _difference(expected: Sequence[int], came: Sequence[int]) -> str:
    at = next((i for i, pair in enumerate(zip(expected, came, strict=False)) if pair[0] != pair[1]), len(expected))
    return (
        f"at token {at}: {list(came[at : at + 3])} for {list(expected[at : at + 3])} ({len(came)} and {len(expected)} tokens)"
    )
