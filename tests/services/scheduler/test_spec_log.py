"""Speculation is logged in ATOM's words, of late and since the start, once enough of it has happened."""

import structlog

from services.scheduler.core.spec_stats import SpecStats
from services.scheduler.spec_log import ROWS_PER_LINE, SpecLog


def test_two_lines_once_a_thousand_rows_had_drafts() -> None:
    stats, log = SpecStats(), SpecLog()
    with structlog.testing.capture_logs() as lines:
        for accepted in (0, 1, 3, 0) * (ROWS_PER_LINE // 4):
            assert not lines
            stats.count(3, accepted)
            log.look(stats)
        for _ in range(ROWS_PER_LINE):
            log.look(stats)
            stats.count(3, 3)
        log.look(stats)
        log.look(stats)
    told = [line["event"] for line in lines]
    first = (
        "Average toks/fwd: 2.00, Accepted/Total Draft tokens: 1000/3000, Acceptance rate: 33.33%, "
        "Accepted tokens distribution: {0: '50.00%', 1: '25.00%', 2: '0.00%', 3: '25.00%'}"
    )
    interval = (
        "Average toks/fwd: 4.00, Accepted/Total Draft tokens: 3000/3000, Acceptance rate: 100.00%, "
        "Accepted tokens distribution: {0: '0.00%', 1: '0.00%', 2: '0.00%', 3: '100.00%'}"
    )
    whole = (
        "Average toks/fwd: 3.00, Accepted/Total Draft tokens: 4000/6000, Acceptance rate: 66.67%, "
        "Accepted tokens distribution: {0: '25.00%', 1: '12.50%', 2: '0.00%', 3: '62.50%'}"
    )
    assert told == [
        f"[MTP Stats Interval] {first}",
        f"[MTP Stats         ] {first}",
        f"[MTP Stats Interval] {interval}",
        f"[MTP Stats         ] {whole}",
    ]
