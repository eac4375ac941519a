"""What is too high about a batch's positions is the room that came to nothing in the steps that its scheduler had not seen."""

import numpy as np
from engine_driver import PROMPT, EngineDriver, Row, entry
from hypothesis import given
from hypothesis import strategies as st

from model_worker.sampling_table import SamplingTable
from model_worker.slot_table import SlotTable
from model_worker.speculation.proposer import Drafts
from model_worker.speculation.unused_room import UnusedRoom

NUM_SLOTS = 4
STEPS = st.lists(
    st.one_of(
        st.dictionaries(st.integers(0, NUM_SLOTS - 1), st.integers(0, 3), min_size=1),  # slot -> positions
        st.integers(0, NUM_SLOTS - 1),  # a slot that is given up
        st.floats(0, 1),  # how far the scheduler has seen
    ),
    max_size=20,
)


@given(steps=STEPS, asked=st.integers(0, 20))
def test_it_is_the_sum_over_later_steps(steps: list[dict[int, int] | int | float], asked: int) -> None:
    room, told = UnusedRoom(NUM_SLOTS), {}
    seen = 0
    for step, event in enumerate(steps, 1):
        if isinstance(event, dict):
            room.note(step, np.array(list(event)), np.array(list(event.values())))
            told |= {(step, slot): positions for slot, positions in event.items()}
        elif isinstance(event, int):
            room.forget_slot(event)
            told = {key: positions for key, positions in told.items() if key[1] != event}
        else:
            seen = max(seen, int(event * step))
            room.forget_until(seen)
    expected = np.zeros(NUM_SLOTS, np.int64)
    for (step, slot), positions in told.items():
        expected[slot] += positions * (step > max(seen, asked))
    assert room.since(max(seen, asked)).tolist() == expected.tolist()


class OneWrong:
    """A draft that is never right."""

    def propose(self, slots: np.ndarray, rooms: np.ndarray, table: SlotTable, sampling: SamplingTable) -> Drafts:
        return Drafts(np.ones(len(slots), np.int64), np.full((len(slots), 1), 0, np.int32))


def test_an_engine_keeps_no_more_of_it_than_its_scheduler_has_not_seen() -> None:
    driver = EngineDriver(proposer=OneWrong())
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2, 4, 5, 6])])
    for _ in range(10):
        length = driver.engine.report(1).slots[0].computed_len
        driver.run([Row(0, 2, length + 2)], num_decodes=1, seen_step=driver.step)
    assert len(driver.engine._slots.unused_room._steps) == 1
