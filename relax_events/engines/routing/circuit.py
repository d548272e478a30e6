"""When an engine that was lost is tried again, and with how much."""

from __future__ import annotations

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0


class Circuit:
    """Counts losses, one after the other, without a sample that has ended in between.

    closed --lost--> open: nothing is sent; a pause, longer each time --opened--> half open: one prompt group --a sample ended--> closed
    """

    def __init__(self) -> None:
        self.num_barren = 0

    @property
    def is_half_open(self) -> bool:
        """Whether the engine has yet to show that it is of use again."""
        return self.num_barren > 0

    def lose(self) -> float:
        """Note that the engine was lost; return the seconds until it is tried again, none the first time."""
        self.num_barren += 1
        doublings = self.num_barren - 2
        return 0.0 if doublings < 0 else min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(doublings, 30))

    def close(self) -> None:
        """Note that a sample has ended."""
        self.num_barren = 0
