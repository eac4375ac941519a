"""How many tokens the requests of a gateway may come to, prompts and all that their answers may become: of all, and of one principal.

A request counts from the moment it is submitted until its scheduler has ended it, its client being there or not.
"""

from services.gateway.live_requests import LiveRequests
from services.gateway.running_calls import RESUMES_FACTOR, RETRY_AFTER_MS, SUBJECT
from services.rpc.errors import FieldViolation, InvalidArgument, Overloaded


class TokenBudget:
    """Of 0 there is no limit. Those of nobody in particular have none of their own."""

    def __init__(self, live: LiveRequests, tokens_max: int = 0, tokens_max_per_principal: int = 0) -> None:
        self._live = live
        self._tokens_max = tokens_max
        self._tokens_max_per_principal = tokens_max_per_principal

    def request_len_max(self, principal: str) -> int | None:
        """Tokens that one request may come to at the most; None where there is no limit."""
        limits = [self._tokens_max, self._tokens_max_per_principal if principal else 0]
        return min((limit for limit in limits if limit), default=None)

    def check(self, principal: str, num_tokens: int, is_resume: bool, field: str) -> None:
        """Whether there is room for a request of so many tokens. Raises Overloaded where there is none at present, InvalidArgument naming
        `field`, which makes it so large, where there never is. For resumes the limits are wider: nothing that runs is lost."""
        factor = RESUMES_FACTOR if is_resume else 1
        if principal:
            limit, used = factor * self._tokens_max_per_principal, self._live.reserved_of(principal)
            whose, subject, reason = f" of {principal}", f"principal:{principal}", "PRINCIPAL_TOKEN_LIMIT"
            _check(num_tokens, used, limit, (whose, subject, reason), field)
        _check(num_tokens, self._live.num_reserved, factor * self._tokens_max, ("", SUBJECT, "TOKEN_LIMIT"), field)


def _check(num_tokens: int, used: int, limit: int, named: tuple[str, str, str], field: str) -> None:
    """`named`: whose requests in words, the subject of the quota, and the reason."""
    whose, subject, reason = named
    numbers = {"limit": str(limit), "used": str(used), "asked": str(num_tokens)}
    if limit and num_tokens > limit:
        text = f"makes {num_tokens} tokens or more, prompt and output together; the requests{whose} may have {limit} at this gateway"
        raise InvalidArgument((FieldViolation(field, text),), reason=reason, metadata=numbers)
    if limit and used + num_tokens > limit:
        text = f"the requests{whose} at this gateway may come to {used} tokens, with these {num_tokens} to more than {limit}"
        raise Overloaded(text, reason=reason, retry_after_ms=RETRY_AFTER_MS, metadata=numbers, subject=subject)
