"""In which order the treatments of a run are applied to its blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.plan.costs import TreatmentCost


def placed(
    treatments: Sequence[TreatmentCost], room_bytes: int, held_bytes: int, *, spread: bool, last: bool
) -> list[TreatmentCost]:
    """The treatments of one run in the order of the forward.

    Falling working sets have the lowest peak (plan.search). spread: what is copied is spread as evenly as the room
    allows: a block that copies more than fits beside its own computation makes the step wait, even where its neighbours
    copy nothing. A treatment may then stand later, as long as those that remain still fit in that order.

    room_bytes: for all that the run and those before it hold, and its working sets. held_bytes: by those before it.
    last: nothing runs after it, so the one at its end must not move anything.
    """
    remaining = _Remaining(sorted(treatments, key=_working_first), held_bytes, room_bytes)
    blocks = sum(cost.blocks for cost in treatments)
    average_bytes = sum(cost.copied_bytes for cost in treatments) / blocks
    found: list[TreatmentCost] = []
    missing_bytes = 0.0  # what would have been copied by now, if all were even
    while remaining.treatments:
        allowed = remaining.at_the_end(staying=last and not found)
        chosen = allowed[0]
        if spread:
            chosen = min(allowed, key=lambda cost: abs(missing_bytes + average_bytes * cost.blocks - cost.copied_bytes))
        missing_bytes += average_bytes * chosen.blocks - chosen.copied_bytes
        remaining.take(chosen)
        found.append(chosen)
    return found[::-1]


def _working_first(cost: TreatmentCost) -> tuple[int, int, str]:
    return -cost.working_bytes, cost.kept_bytes, cost.word


@dataclass
class _Remaining:
    """Treatments that have no place yet, by falling working sets."""

    treatments: list[TreatmentCost]
    held_bytes: int
    room_bytes: int

    def at_the_end(self, staying: bool) -> list[TreatmentCost]:
        """Those that may be the last of them, the one with the smallest working set first.

        staying: of those that move nothing.
        """
        distinct = list(dict.fromkeys(reversed(self.treatments)))
        able = [cost for cost in distinct if not (staying and cost.moves)]
        return [cost for cost in able if self._fits(cost)]

    def take(self, cost: TreatmentCost) -> None:
        self.treatments.remove(cost)

    def _fits(self, last: TreatmentCost) -> bool:
        order = list(self.treatments)
        order.remove(last)
        held_bytes = self.held_bytes
        for cost in (*order, last):
            held_bytes += cost.kept_bytes
            if held_bytes + cost.working_bytes > self.room_bytes:
                return False
        return True
