"""What gateways say of their requests, as calls of the scheduler and of the streams; and the answers to it."""

from collections.abc import Callable

from services.scheduler.core.admission import Admitted, Known, RefusalReason, Refused, Unknown
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.streams import Streams
from services.scheduler.sessions import GatewaySession
from tessera.values.model import ModelInfo
from tessera.values.session import (
    Abort,
    Detach,
    KnownAs,
    LiveRequest,
    Rejected,
    RejectReason,
    StopFound,
    Submit,
    TakenOver,
)

_REJECT = {
    RefusalReason.TOO_LONG: RejectReason.TOO_LONG,
    RefusalReason.OVERLOADED: RejectReason.OVERLOADED,
    RefusalReason.ALREADY_EXISTS: RejectReason.ALREADY_EXISTS,
    RefusalReason.PAUSED: RejectReason.PAUSED,
    RefusalReason.NO_WORKER: RejectReason.OVERLOADED,
}


class RequestDesk:
    """Of one leader. Changes the scheduler's requests and who is sent what; it decides nothing about what runs."""

    def __init__(
        self, scheduler: Scheduler, streams: Streams[GatewaySession], model: ModelInfo, clock: Callable[[], int]
    ) -> None:
        self._scheduler = scheduler
        self._streams = streams
        self._model = model
        self._clock = clock

    def claim_live(self, session: GatewaySession, live: LiveRequest) -> bool:
        """A gateway still streams this request. False where it is to submit it again."""
        if self._foreign_id(live.token_ids) is not None:  # submitted again, that is answered
            return False
        holder = self._streams.holder(live.request_id)
        if holder is not None and holder.subscriber == live.subscriber and holder.session.gateway_id != session.gateway_id:
            # Its client has come again at another gateway, while this one could not be told.
            session.post(TakenOver(live.request_id, live.subscriber))
            return True
        answer = self._scheduler.claim(live.request_id, live.subscriber, live.token_ids, self._clock())
        if isinstance(answer, Unknown):
            return False
        self._claim(session, live.request_id, live.subscriber, len(live.token_ids))
        return True

    def heard_of(self, request_id: bytes, message: Abort | Detach | StopFound) -> None:
        """What the gateway that has claimed a request says of it."""
        now = self._clock()
        match message:
            case Abort():
                self._scheduler.abort(request_id, now)
            case Detach(grace_ms=grace_ms):
                self._streams.detach(request_id, now, None if grace_ms is None else 1000 * grace_ms)
            case StopFound(output_len=output_len, stop_string=stop_string):
                self._scheduler.stop_found(request_id, output_len, stop_string, now)

    def submit(self, session: GatewaySession, submit: Submit) -> bool:
        """Take a request in, or go on with it. Returns whether it is a new request, of which nobody has to be told anything yet."""
        request_id = submit.submission.request_id
        foreign_id = self._foreign_id((int(submit.submission.prompt_token_ids.max()), *submit.received_token_ids))
        if foreign_id is not None:
            message = f"token id {foreign_id} is not in the vocabulary of {self._model.vocab_size}"
            session.post(Rejected(request_id, submit.subscriber, RejectReason.INVALID, message))
            return False
        answer = self._scheduler.submit(submit.submission, submit.subscriber, submit.received_token_ids, self._clock())
        match answer:
            case Admitted() | Known():
                self._claim(session, answer.request_id, submit.subscriber, len(submit.received_token_ids), request_id)
            case Refused():
                reason = _REJECT[answer.reason]
                session.post(Rejected(request_id, submit.subscriber, reason, answer.message, answer.retry_after_ms))
        return isinstance(answer, Admitted)

    def _foreign_id(self, token_ids: tuple[int, ...]) -> int | None:
        """The highest id where it names no token: a worker would refuse every batch with it, and the neighbours in that batch."""
        highest = max(token_ids, default=0)
        return highest if highest >= self._model.vocab_size else None

    def _claim(
        self, session: GatewaySession, request_id: bytes, subscriber: int, received_len: int, submitted_id: bytes | None = None
    ) -> None:
        """The highest subscriber number wins; whoever loses is told. A gateway that submitted the request under another id goes on
        under the one it is known as, and ends its own earlier stream of it, if it has one."""
        alias = None if submitted_id == request_id else submitted_id
        answer = self._streams.claim(session, request_id, subscriber, received_len, alias)
        if isinstance(answer, TakenOver):
            session.post(answer)
            return
        if alias is not None:
            session.post(KnownAs(alias, subscriber, request_id))
        if answer.replaced is not None:
            answer.replaced.session.post(TakenOver(request_id, answer.replaced.subscriber))
