"""Reasons that a worker's errors carry, for the scheduler's end to tell them apart."""

OLDER_EPOCH = "OLDER_EPOCH"
"""A later leader commands the worker; the error's `epoch_number` and `epoch_instance` name its epoch."""

SUPERSEDED = "SUPERSEDED"
"""A later Attach of the same leader took the stream's place."""

NOT_SERVING = "NOT_SERVING"
"""The worker is loading or shutting down. What it had started when it began to shut down has been answered."""
