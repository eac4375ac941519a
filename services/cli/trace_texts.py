"""What people read of the options for traces."""

from services.cli.config_options import Text

OTLP_ENDPOINT = Text(
    "Send spans of traced requests to the OpenTelemetry collector here (its gRPC port; https for TLS). Empty: nothing is traced.",
    "http://HOST:PORT",
)
TRACE_SAMPLE_RATIO = Text(
    "Which part of the calls is traced, 0 to 1, of those that no trace of the client's own decides about.", "RATIO"
)
