"""Structured logs on standard error: for people on a terminal, JSON elsewhere. Prompts and outputs are never logged."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

LEVELS = ("debug", "info", "warning", "error")


def configure_logs(role: str, level: str = "info") -> None:
    """Set up logging for this process, once, in its `main`. Every line says the `role`; the standard library's loggers (grpc's, asyncio's)
    go the same way. `level` is one of LEVELS."""
    number = logging.getLevelNamesMapping()[level.upper()]

    def name_role(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["role"] = role
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        name_role,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_renderers()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for chatty in ("asyncio", "grpc"):
        logging.getLogger(chatty).setLevel(max(number, logging.WARNING))
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """False where grpc tells, with a trace and as an error, that it could not send to a peer that has just left, or that a server which
    ends has cancelled a call: both may be."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ not in ("ExecuteBatchError", "CancelledError")


def _renderers() -> list[structlog.typing.Processor]:
    drop_internals = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if sys.stderr.isatty():
        return [drop_internals, structlog.dev.ConsoleRenderer()]
    return [drop_internals, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
