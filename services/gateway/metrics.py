"""What a gateway shows to Prometheus beside its calls. Tokens and times are the scheduler's to count: it sees every request once."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from services.gateway.running_calls import RunningCalls
from services.gateway.session import SchedulerSession
from services.rpc.metric_families import Families


def gateway_metrics(session: SchedulerSession, calls: RunningCalls) -> Iterable[Metric]:
    """All families at this moment."""
    families = Families()
    families.gauge("tessera:gateway_calls", "Calls that generate, at present.", calls.count)
    text = "Requests that the scheduler has not ended, those whose client has left among them."
    families.gauge("tessera:gateway_live_requests", text, len(session.live))
    families.gauge("tessera:gateway_reserved_tokens", "Tokens that those may come to.", session.live.num_reserved)
    families.gauge("tessera:gateway_connected", "1 while a leading scheduler answers.", session.is_connected)
    return families.metrics
