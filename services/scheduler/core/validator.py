"""Whether a submission can come in at all, told before anything changes."""

from services.scheduler.core.admission import (
    PAUSED,
    RETRY_AFTER_MS,
    RefusalReason,
    Refused,
    queue_full,
    same_body,
    too_long,
)
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.sequence import Sequence
from tessera.values.config import Config
from tessera.values.request import Submission


class Validator:
    """Refuses what is too long, comes to a full queue, or takes a name that is not its own."""

    def __init__(self, config: Config, lifecycle: Lifecycle) -> None:
        self.is_paused = False  # no new request comes in
        self._config = config
        self._book = lifecycle.book
        self._fleet = lifecycle.fleet
        self._waiting = lifecycle.waiting

    def find(self, submission: Submission, subscriber: int) -> Sequence | None:
        """The request that a Submit is of: by its internal id, else by the client's own, which names a live request; and, where
        `subscriber` says that it is a resume, one that has ended and can still be read."""
        known = self._book.get(submission.request_id)
        if known is None:
            known = self._book.live_with_client_id(submission.principal, submission.client_request_id)
        if known is None and subscriber > 0:
            known = self._book.finished_with_client_id(submission.principal, submission.client_request_id)
        return known

    def contradiction(self, known: Sequence, submission: Submission, subscriber: int) -> Refused | None:
        """Why a Submit is not of the request that its ids name. One of several answers is not asked for again, since that would take it from
        whom it was begun for; only who says that it goes on with it (`subscriber` above 0) may."""
        if known.submission.principal != submission.principal:
            return Refused(RefusalReason.ALREADY_EXISTS, "the request id is taken")
        name = submission.client_request_id
        if known.request_id == submission.request_id:
            return None
        if subscriber == 0 and (known.submission.is_one_of_several or submission.is_one_of_several):
            grace_ms = self._config.gateway_grace_ms
            text = f"the request id lives, and several answers are not gone on with; if their gateway is gone, they end within {grace_ms} ms"
            return Refused(RefusalReason.ALREADY_EXISTS, text, grace_ms)
        if same_body(known.submission, submission):
            return None
        if known.finish is not None:
            return Refused(RefusalReason.ALREADY_EXISTS, f"the request {name!r} has ended, and had another body")
        grace_ms = self._config.gateway_grace_ms
        message = f"{name!r} lives with another body; if its gateway is gone, it ends within {grace_ms} ms"
        return Refused(RefusalReason.ALREADY_EXISTS, message, grace_ms)

    def refusal(self, submission: Submission, has_begun: bool, has_output: bool = False) -> Refused | None:
        """Why a new request cannot come in. For one that had begun the queue's limits are wider: nothing in flight is lost."""
        if self.is_paused and not has_output:  # a client that was refused comes again as one that resumes
            return PAUSED
        len_max, step_tokens_max = self._fleet.request_len_max, self._fleet.step_tokens_max
        if len_max is None or step_tokens_max is None:
            return Refused(RefusalReason.NO_WORKER, "no model worker is there", RETRY_AFTER_MS)
        prompt_len = len(submission.prompt_token_ids)
        whole_prompt_max = None if self._config.enable_chunked_prefill else step_tokens_max
        refused = too_long(prompt_len, submission.max_model_length, len_max, whole_prompt_max)
        if refused is not None:
            return refused
        return queue_full(prompt_len, len(self._waiting), self._waiting.num_tokens, self._config, has_begun)
