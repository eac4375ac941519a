"""Which version of the internal protocols this code speaks."""

PROTOCOL_VERSION = 5
"""Of the session and of the worker's service, together. Grows with every change that an older peer would misread: gateways,
schedulers and workers of different versions refuse each other instead."""

VERSION_SKEW = "VERSION_SKEW"
"""Reason of the FailedPrecondition where two sides speak different versions."""
