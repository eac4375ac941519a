"""What a gateway process allows its calls, on all of its ports together."""

from dataclasses import dataclass
from typing import Self

from services.gateway.config import GatewayConfig
from services.gateway.live_requests import LiveRequests
from services.gateway.running_calls import RunningCalls
from services.gateway.slow_readers import SlowReaders
from services.gateway.token_budget import TokenBudget


@dataclass(frozen=True, slots=True)
class CallBounds:
    """How many calls, how many tokens, and how long a client may leave its stream unread."""

    calls: RunningCalls
    tokens: TokenBudget
    readers: SlowReaders

    @classmethod
    def of(cls, config: GatewayConfig, live: LiveRequests) -> Self:
        """As configured, for the requests `live`."""
        return cls(
            RunningCalls(config.max_concurrent_requests, live, config.max_requests_per_principal),
            TokenBudget(live, config.max_concurrent_tokens, config.max_tokens_per_principal),
            SlowReaders(config.slow_reader_ms / 1000, config.unread_tokens_max, config.detach_grace_ms),
        )
