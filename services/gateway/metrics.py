"""What a gateway shows to Prometheus beside its calls. Tokens and times are the scheduler's to count: it sees every request once."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from services.gateway.call_bounds import CallBounds
from services.gateway.session import SchedulerSession
from services.rpc.metric_families import Families


def gateway_metrics(session: SchedulerSession, bounds: CallBounds) -> Iterable[Metric]:
    """All families at this moment."""
    families = Families()
    families.gauge("tessera:gateway_calls", "Calls that generate, at present.", bounds.calls.count)
    text = "Requests that the scheduler has not ended, those whose client has left among them."
    families.gauge("tessera:gateway_live_requests", text, len(session.live))
    families.gauge("tessera:gateway_reserved_tokens", "Tokens that those may come to.", session.live.num_reserved)
    text = "Streams ended because their clients did not read them."
    families.counter("tessera:gateway_slow_readers", text, bounds.readers.num_ended)
    families.gauge("tessera:gateway_connected", "1 while a leading scheduler answers.", session.is_connected)
    return families.metrics
