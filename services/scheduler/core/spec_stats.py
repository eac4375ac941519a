"""How much speculation brings: drafts verified, and how many of a row were accepted (ATOM's `SpecStats`)."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpecStats:
    """Decode rows with drafts, since the start. `accepted[n]` of them had exactly n drafts accepted; rows without drafts count nowhere."""

    num_drafts: int = 0  # that a worker verified
    accepted: list[int] = field(default_factory=list)

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """One row verified `num_drafts` >= 1 drafts, of which the first `num_accepted` were right."""
        assert 0 <= num_accepted <= num_drafts > 0, f"{num_accepted} of {num_drafts} drafts accepted"
        self.num_drafts += num_drafts
        self.accepted += [0] * (num_accepted + 1 - len(self.accepted))
        self.accepted[num_accepted] += 1

    def since(self, earlier: "SpecStats") -> "SpecStats":
        """What was counted after `earlier`, a copy of these counts as they were then."""
        before = earlier.accepted + [0] * (len(self.accepted) - len(earlier.accepted))
        return SpecStats(
            self.num_drafts - earlier.num_drafts, [now - then for now, then in zip(self.accepted, before, strict=True)]
        )

    @property
    def num_steps(self) -> int:
        """Rows counted."""
        return sum(self.accepted)

    @property
    def num_accepted(self) -> int:
        """Drafts accepted."""
        return sum(number * rows for number, rows in enumerate(self.accepted))

    @property
    def accepted_by_position(self) -> list[int]:
        """Of the first, second, ... draft of a row, how many were accepted; up to the last position where any was."""
        return [sum(self.accepted[number:]) for number in range(1, len(self.accepted))]

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts of those verified; 0 where there were none."""
        return self.num_accepted / self.num_drafts if self.num_drafts else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a row with drafts samples on average; 0 where there were none."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else 0.0
