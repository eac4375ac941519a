"""What dashboards show of a leader, read at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.scheduler.core.journal import Journal
from services.scheduler.core.load import Load
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.service_figures import ServiceFigures
from services.scheduler.core.spec_stats import SpecStats


@dataclass(frozen=True, slots=True)
class LeaderSight:
    """`figures` and `spec_stats` are the leader's own, not to be changed. `block_size` is 0 before a worker was there."""

    model: str
    epoch: int
    block_size: int
    load: Load
    figures: ServiceFigures
    spec_stats: SpecStats
    is_durable: bool
    journal_records: int  # made, and not acknowledged by the store
    journal_lag_us: int  # the age of the oldest of them
    unsent_tokens: Mapping[str, int]  # by gateway: what it may see, and has not been sent

    @classmethod
    def of(
        cls, model: str, epoch: int, scheduler: Scheduler, journal: Journal, unsent_tokens: Mapping[str, int], now_us: int
    ) -> "LeaderSight":
        """Of the parts of a leader."""
        layout = scheduler.layout
        return cls(
            model=model,
            epoch=epoch,
            block_size=layout[0] if layout is not None else 0,
            load=scheduler.load(),
            figures=scheduler.figures,
            spec_stats=scheduler.spec_stats,
            is_durable=journal.is_durable(now_us),
            journal_records=journal.last_record - journal.acked,
            journal_lag_us=journal.lag_us(now_us),
            unsent_tokens=unsent_tokens,
        )
