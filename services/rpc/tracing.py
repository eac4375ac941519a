"""Whether a process traces, and where it sends its spans. OpenTelemetry is an extra, and imported only by a process that was told to trace."""

import importlib.util
from typing import TYPE_CHECKING

from tessera.values.config import ConfigError

if TYPE_CHECKING:
    from services.rpc.spans import Tracing

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")


def check_otlp_endpoint(endpoint: str) -> None:
    """Raise ConfigError for an `otlp_endpoint` that says not how it is spoken to. Empty is none."""
    scheme, _, rest = endpoint.partition("://")
    if endpoint and (scheme not in ("http", "https") or not rest):
        raise ConfigError(
            f"otlp_endpoint must be http://HOST:PORT, or https://HOST:PORT for TLS, of a collector's gRPC port; got {endpoint!r}"
        )


def check_sample_ratio(ratio: float) -> None:
    """Raise ConfigError for a `trace_sample_ratio` that is none."""
    if not 0 <= ratio <= 1:
        raise ConfigError(f"trace_sample_ratio must be from 0 to 1, got {ratio:g}")


def start_tracing(role: str, otlp_endpoint: str, sample_ratio: float = 1.0) -> "Tracing | None":
    """What this process makes its spans by, None without an endpoint. `sample_ratio`: of the traces that begin here. The caller stops
    it. Raises ConfigError where the packages are not installed."""
    if not otlp_endpoint:
        return None
    if not all(map(_is_installed, PACKAGES)):
        raise ConfigError("otlp_endpoint needs OpenTelemetry's packages: run `pip install 'tessera-server[tracing]'`")
    from services.rpc.spans import Tracing  # here: nobody else pays for it

    return Tracing.to_collector(role, otlp_endpoint, sample_ratio)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even what it lies in
        return False
