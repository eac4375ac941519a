"""What a step is made of: the batch policies, as pure strategies over what can still be added to it."""

from collections.abc import Callable
from typing import Protocol, TypeAlias


class StepRows(Protocol):
    """A step under construction. Each call adds what fits of one kind and says whether that was anything."""

    def add_decodes(self) -> bool:
        """Running sequences that sample next."""

    def add_prefills(self) -> bool:
        """Chunks of running prefills, then first chunks of waiting sequences, in their order, up to the first that does not fit."""


BatchPolicy: TypeAlias = Callable[[StepRows], None]


def mixed(rows: StepRows) -> None:
    """Every running decode gets its token, the rest of the budget goes to prefills."""
    rows.add_decodes()
    rows.add_prefills()


def prefill_first(rows: StepRows) -> None:
    """A step is all prefill or all decode (ATOM): prefills as long as there are any."""
    if not rows.add_prefills():
        rows.add_decodes()


BATCH_POLICIES: dict[str, BatchPolicy] = {"mixed": mixed, "prefill_first": prefill_first}
"""By the names of `Config.policy`."""
