"""Whether vLLM's engine protocol is installed: it comes as a package of its own, which only the engine's port needs."""

import importlib.util

from tessera.values.config import ConfigError

PACKAGE = "smg_grpc_proto"


def check_installed() -> None:
    """Raises ConfigError, which says what to install."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError("engine_listen needs the package smg-grpc-proto: run `pip install 'tessera-server[engine]'`")
