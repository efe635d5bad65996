"""In which order the treatments of a run are applied to its blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.plan.costs import TreatmentCost
from lowtide.plan.ways import best_first, working_beside


class Room(NamedTuple):
    """all_bytes: for all that the run and those before it hold, and its working sets; beside in_flight_bytes.
    held_bytes: by those before it. reaches_in: see ways.ways_of_runs."""

    all_bytes: int
    in_flight_bytes: int
    held_bytes: int
    reaches_in: bool


def placed(treatments: Sequence[TreatmentCost], room: Room, *, spread: bool, last: bool) -> list[TreatmentCost]:
    """The treatments of one run in the order of the forward.

    One order has the lowest peak (plan.search). spread: what is copied is spread as evenly as the room
    allows: a block that copies more than fits beside its own computation makes the step wait, even where its neighbours
    copy nothing. A treatment may then stand later, as long as those that remain still fit in that order.

    last: nothing runs after it, so the one at its end must not move anything.
    """
    remaining = _Remaining(sorted(treatments, key=lambda cost: _in_order(cost, room)), room)
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


def _in_order(cost: TreatmentCost, room: Room) -> tuple[tuple[int, int, int], str]:
    return best_first(cost.net_bytes, working_beside(cost, room.in_flight_bytes)), cost.word


@dataclass
class _Remaining:
    """Treatments that have no place yet, in the best order."""

    treatments: list[TreatmentCost]
    room: Room

    def at_the_end(self, staying: bool) -> list[TreatmentCost]:
        """Those that may be the last of them, the one that is last in the best order first.

        staying: of those that move nothing.
        """
        distinct = list(dict.fromkeys(reversed(self.treatments)))
        able = [cost for cost in distinct if not (staying and cost.moves)]
        return [cost for cost in able if self._fits(cost, runs_last=staying)]

    def take(self, cost: TreatmentCost) -> None:
        self.treatments.remove(cost)

    def _fits(self, end: TreatmentCost, runs_last: bool) -> bool:
        order = list(self.treatments)
        order.remove(end)
        held_bytes = self.room.held_bytes
        for place, cost in enumerate((*order, end)):
            held_bytes += cost.net_bytes
            wakes = self.room.reaches_in and runs_last and place == len(order)
            if held_bytes + working_beside(cost, self.room.in_flight_bytes, wakes) > self.room.all_bytes:
                return False
        return True
