"""A client as a process: asks, checks every piece of the answer against the undisturbed one, and comes back when its stream breaks."""

from enum import Enum

from gateway.delta import Delta
from tessera.values.finish import FinishReason
from tests.simulation.gateway_actor import Refusal, Resume, SimGateway
from tests.simulation.workload import Answer, Ask, num_untold, text_of
from tests.simulation.world import Actor, End, Violation, World

PING = 500_000
SILENCE = 1_500_000
"""A gateway that answers no ping for so long is given up."""

RETRY = 100_000


class Manner(Enum):
    """How a client behaves."""

    RESUMES = "resumes"  # with what it has got
    RETRIES = "retries"  # asks the same again, from the beginning
    LEAVES = "leaves"  # goes away in the middle, and resumes elsewhere
    CANCELS = "cancels"  # in the middle, for good
    ABORTS = "aborts"  # in the middle, and waits for the end


class SimClient(Actor):
    """Lives as long as the run. `is_done`: it has its whole answer, or has given up what it cancelled."""

    def __init__(
        self, world: World, ask: Ask, expected: Answer, manner: Manner, gateways: list[SimGateway], *, may_detach: bool
    ) -> None:
        super().__init__(world, f"client-{ask.client_request_id}")
        self._ask, self._expected, self._manner, self._gateways = ask, expected, manner, gateways
        self._number = -1
        self._gateway = world.rng.randrange(len(gateways))
        self._end: End | None = None
        self._heard_at = 0
        self._answer = Answer()
        self._leave_after = world.rng.randrange(1, 12)
        self._may_detach = may_detach
        self._must_be_whole = True
        self.is_done = False
        self.num_untold = 0  # tokens without the log-probabilities that were asked for

    def start(self) -> None:
        """Ask, or ask on."""
        if self.is_done:
            return
        gateway = self._gateways[self._gateway]
        end = self.world.connect(self, gateway, "call")
        if end is None:
            self._come_back()
            return
        self._end, self._heard_at = end, self.world.now
        end.on_message = lambda message: self._hear(end, message)
        end.on_close = lambda: self._broken(end, "closed")
        if self._manner is Manner.RETRIES:
            self._answer = Answer()
            end.send(("generate", self._ask, None))
        else:
            self._number += 1
            answer = self._answer
            count, keeps = len(answer.token_ids), self.world.rng.random() < 0.7
            token_ids = tuple(answer.token_ids) if keeps else ()
            resume = Resume(self._number, count, len(answer.text.encode()), token_ids) if self._number else None
            end.send(("generate", self._ask, resume))
        self.later(PING, lambda: self._ping(end))

    def _ping(self, end: End) -> None:
        if end is not self._end or not end.is_open:
            return
        if self.world.now - self._heard_at > SILENCE:
            end.close()
            self._broken(end, "silent")
            return
        end.send(("ping", None, None))
        self.later(PING, lambda: self._ping(end))

    def _broken(self, end: End, why: str) -> None:
        if end is self._end and not self.is_done:
            self.log("loses its stream:", why)
            self._end = None
            gateway = self._gateways[self._gateway]
            if not self._may_detach and gateway.lives_on(end.peer):
                self._must_be_whole = False  # to its gateway this is a client that has gone: the request is aborted
            self._come_back()

    def _come_back(self) -> None:
        self._gateway = (self._gateway + 1) % len(self._gateways)
        self.later(RETRY, self.start)

    def _hear(self, end: End, message: Delta | Refusal | str) -> None:
        self._heard_at = self.world.now
        if end is not self._end:
            return
        if isinstance(message, Delta):
            self._take(message)
        elif isinstance(message, Refusal):
            self.log("is refused:", message.reason)
            # Two tries without numbers cannot be told apart: one that was stuck somewhere takes over from the present one.
            is_own = message.reason == "TAKEN_OVER" and self._manner is Manner.RETRIES
            if not message.is_retriable and not is_own:
                raise Violation(f"{self.name}: {message.reason}: {message.message}")
            self._broken(end, message.reason)
            end.close()

    def _take(self, delta: Delta) -> None:
        answer, expected = self._answer, self._expected
        if answer.finish is not None:
            raise Violation(f"{self.name}: something came after the end: {delta}")
        if (delta.token_offset, delta.text_offset) != (len(answer.token_ids), len(answer.text.encode())):
            held = (len(answer.token_ids), len(answer.text.encode()))
            raise Violation(f"{self.name}: offsets {(delta.token_offset, delta.text_offset)} came after {held}")
        answer.token_ids += delta.token_ids
        answer.text += delta.text
        if answer.token_ids != expected.token_ids[: len(answer.token_ids)]:
            raise Violation(f"{self.name}: got {answer.token_ids}, an undisturbed run gives {expected.token_ids}")
        untold = num_untold(self._ask, answer.token_ids, delta)
        if untold is None:
            raise Violation(f"{self.name}: the log-probabilities of tokens from {delta.token_offset} on are others'")
        self.num_untold += untold
        is_aborted = delta.finish is not None and delta.finish.reason is FinishReason.ABORTED
        shown = (
            text_of(answer.token_ids) if is_aborted else expected.text
        )  # an abort shows what could have become a stop string
        if not shown.startswith(answer.text):
            raise Violation(f"{self.name}: got the text {answer.text!r}, an undisturbed run gives {expected.text!r}")
        if delta.finish is not None:
            self._finish(delta)
        elif self._leave_after and len(answer.token_ids) >= self._leave_after:
            self._leave()

    def _finish(self, delta: Delta) -> None:
        answer, expected = self._answer, self._expected
        answer.finish = delta.finish
        assert answer.finish is not None
        self.log("has its answer:", answer.finish.label, len(answer.token_ids))
        is_aborted = answer.finish.reason is FinishReason.ABORTED and not self._must_be_whole
        if not is_aborted and (answer.finish, answer.token_ids, answer.text) != (
            expected.finish,
            expected.token_ids,
            expected.text,
        ):
            raise Violation(f"{self.name}: the answer ended as {answer}, an undisturbed run gives {expected}")
        self.is_done = True

    def _leave(self) -> None:
        if self._manner is Manner.ABORTS and self._end is not None:
            self._leave_after = 0
            self._must_be_whole = False
            self.log("aborts")
            self._end.send(("abort", self._ask, None))
        if self._manner not in (Manner.LEAVES, Manner.CANCELS):
            return
        self._leave_after = 0
        assert self._end is not None
        end, self._end = self._end, None
        self.log("leaves")
        if self._manner is Manner.CANCELS:
            self.is_done = True
            end.send(("cancel", None, None))
        else:
            end.close()
            self._gateway = self.world.rng.randrange(len(self._gateways))
            self.later(self.world.rng.randrange(10_000, 1_000_000), self.start)
