"""Who makes the call that the present task serves."""

from contextvars import ContextVar

from services.rpc.tokens import Caller, Role

ANYBODY = Caller("", frozenset(Role))
"""Every caller of a server that asks nobody who they are."""

_CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)


def set_caller(caller: Caller) -> None:
    """For the rest of this call, which is a task of its own."""
    _CALLER.set(caller)


def current_principal() -> str:
    """Whose call this is; empty where nobody has to say."""
    return _CALLER.get().principal
