"""ATOM's two log lines about speculation: what it has brought of late, and since the start."""

import structlog

from services.scheduler.core.spec_stats import SpecStats

_log = structlog.get_logger()

ROWS_PER_LINE = 1000
"""Rows with drafts between two reports (ATOM)."""


class SpecLog:
    """Call `look` now and then; it logs where enough has happened since it last did."""

    def __init__(self) -> None:
        self._told = SpecStats()

    def look(self, stats: SpecStats) -> None:
        """Log unless fewer than `ROWS_PER_LINE` rows were counted since the last time."""
        if stats.num_steps - self._told.num_steps < ROWS_PER_LINE:
            return
        _log.info(f"[MTP Stats Interval] {acceptance(stats.since(self._told))}")
        _log.info(f"[MTP Stats         ] {acceptance(stats)}")
        self._told = SpecStats(stats.num_drafts, list(stats.accepted))


def acceptance(stats: SpecStats) -> str:
    """What ATOM's line says of at least one row."""
    shares = {number: f"{rows / stats.num_steps:.2%}" for number, rows in enumerate(stats.accepted)}
    return (
        f"Average toks/fwd: {stats.tokens_per_step:.2f}, Accepted/Total Draft tokens: {stats.num_accepted}/{stats.num_drafts}, "
        f"Acceptance rate: {stats.acceptance_rate:.2%}, Accepted tokens distribution: {shares}"
    )
