"""What operators ask of a leader: commands go to the scheduler's core at once, answers leave once the store has what they changed."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, assert_never

import structlog

from services.scheduler.core.administration import Administration, SweepMark
from services.scheduler.leader_sight import LeaderSight
from services.scheduler.sessions import GatewaySession
from tessera.values.admin import (
    AbortRequests,
    AdminAnswer,
    AdminCommand,
    AdminQuery,
    AdminReply,
    GetStats,
    GroupStats,
    ListRequests,
    PrefixCacheReset,
    ResetPrefixCache,
    SetAdmission,
    SetDrain,
)
from tessera.values.load import GroupLoad

_log = structlog.get_logger()

WAITING_MAX = 1000
"""Answers that may wait for the store; beyond, the oldest is not given, and its gateway gives up waiting for it."""


@dataclass(slots=True)
class _Waiting:
    session: GatewaySession
    reply: AdminReply
    record: int | None = None  # the last one when it was to leave first: whatever the command changed is told by then
    swept: SweepMark | None = None  # of a reset prefix cache: what workers are to forget before


class AdminDesk:
    """Of one leader. `sight` and `load` read what there is to see of it."""

    def __init__(
        self,
        admin: Administration,
        sight: Callable[[], LeaderSight],
        load: Callable[[], GroupLoad],
        clock: Callable[[], int],
    ) -> None:
        self._admin = admin
        self._sight = sight
        self._load = load
        self._clock = clock
        self._began_us = clock()
        self._waiting: list[_Waiting] = []

    def heard(self, session: GatewaySession, query: AdminQuery) -> None:
        """Do it; `release` answers."""
        answer = self._answer(query.command)
        if not isinstance(query.command, GetStats | ListRequests):
            _log.info("administration", gateway=session.gateway_id.hex(), **_named(query.command), **_named(answer))
        mark = self._admin.sweep_mark if isinstance(answer, PrefixCacheReset) else None
        self._waiting.append(_Waiting(session, AdminReply(query.number, answer), swept=mark))
        del self._waiting[:-WAITING_MAX]

    def release(self, acked: int, last_record: int, is_durable: bool) -> None:
        """Send the answers whose records the store has, or all where it does not keep up, as with tokens; but that of a reset of the prefix
        cache only when no worker's report can undo it."""
        if not self._waiting:
            return
        kept = []
        for item in self._waiting:
            if item.record is None:
                item.record = last_record
            is_told = acked >= item.record
            if (is_told and self._admin.is_swept(item.swept or {})) or (item.swept is None and not is_durable):
                item.session.post(item.reply)
            else:
                kept.append(item)
        self._waiting = kept

    def _answer(self, command: AdminCommand) -> AdminAnswer:
        match command:
            case GetStats():
                return self._stats()
            case ListRequests():
                return self._admin.list_requests(command, self._clock())
            case AbortRequests():
                return self._admin.abort(command, self._clock())
            case ResetPrefixCache():
                return self._admin.reset_prefix_cache()
            case SetAdmission(is_paused):
                return self._admin.set_admission(is_paused)
            case SetDrain():
                return self._admin.set_drain(command)
            case _:
                assert_never(command)

    def _stats(self) -> GroupStats:
        seen = self._sight()
        return GroupStats(
            model=seen.model,
            epoch=seen.epoch,
            uptime_ms=(self._clock() - self._began_us) // 1000,
            is_admission_paused=self._admin.is_admission_paused,
            is_durable=seen.is_durable,
            journal_lag_records=seen.journal_records,
            journal_lag_ms=seen.journal_lag_us // 1000,
            num_submitted=seen.load.num_submitted,
            num_ended=sum(seen.load.num_ended.values()),
            num_sampled_tokens=seen.load.num_sampled_tokens,
            num_preemptions=seen.load.num_preemptions,
            num_readable=seen.load.num_finished,
            load=self._load(),
        )


def _named(value: AdminCommand | AdminAnswer) -> dict[str, Any]:
    """What was ordered, or came of it, for the log: the facts under the name of their kind."""
    facts = {name: fact.hex() if isinstance(fact, bytes) else fact for name, fact in asdict(value).items() if fact is not None}
    return {type(value).__name__: facts}
