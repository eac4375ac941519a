"""Log lines are JSON off a terminal, carry the role, and respect the level; the standard library's loggers take part."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import asyncio, logging, structlog
from services.rpc.logs import configure_logs
early = structlog.get_logger()  # as modules make them at import
configure_logs("gateway", "info")
early.info("started", address="here")
early.debug("hidden")
logging.getLogger("grpc").warning("from %s", "grpc")
from grpc._cython.cygrpc import ExecuteBatchError
library = logging.getLogger("grpc._cython.cygrpc")
try:
    raise ExecuteBatchError("to a client that has left")
except ExecuteBatchError:
    library.exception("not news")
try:
    raise asyncio.CancelledError
except asyncio.CancelledError:
    library.exception("not news either")
library.error("from the library")
try:
    1 / 0
except ZeroDivisionError as error:
    early.error("failed", exc_info=error)
"""


def test_lines_are_json_with_role_level_and_trace():
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["event"], line["level"]) for line in lines] == [
        ("started", "info"),
        ("from grpc", "warning"),
        ("from the library", "error"),
        ("failed", "error"),
    ]
    assert all(line["role"] == "gateway" and line["timestamp"].endswith("Z") for line in lines)
    assert lines[0]["address"] == "here"
    assert "ZeroDivisionError" in lines[-1]["exception"]
    assert done.stdout == ""
