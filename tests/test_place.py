"""What a rank writes about where it is, and what another process reads of it."""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megalite.place import SLOT_BYTES, DevicePlace, Phase, Place, Reading, Where
from megalite.schedule.action import Action, Op


def where(memory: Any) -> Where:
    return Where.of(Reading.of(memoryview(memory).cast("B").cast("q")).word)


@given(
    op=st.sampled_from(Op),
    stage=st.integers(0, 2**20),
    microbatch=st.integers(-1, 2**24 - 2),
    waits=st.booleans(),
    phase=st.sampled_from([Phase.ACTIONS, Phase.EVALUATION, Phase.SAMPLING]),
)
def test_every_action_is_read_as_it_was_written(
    op: Op, stage: int, microbatch: int, waits: bool, phase: Phase
) -> None:
    slot = bytearray(SLOT_BYTES)
    place = Place(slot)
    place.at(phase)
    place.act(Action(op, stage, microbatch))
    if waits:
        place.wait()
    assert where(slot) == Where(phase, op, waits, stage, microbatch)
    assert where(slot).action == Action(op, stage, microbatch)
    place.go_on()
    assert where(slot) == Where(phase, op, False, stage, microbatch)


def test_marks_go_through_the_phases_of_a_step_and_are_counted_in_it() -> None:
    slot = bytearray(SLOT_BYTES)
    place = Place(slot)
    assert where(slot) == Where(Phase.START)
    words = memoryview(slot).cast("q")
    for step in (7, 8):
        place.step(step)
        assert where(slot) == Where(Phase.DATA)
        place.act(Action(Op.FORWARD, 0, 0))
        place.acted()
        assert where(slot) == Where(Phase.REDUCTION)
        place.at(Phase.TOTALS)
        reading = Reading.of(words)
        assert (reading.step, reading.count, reading.settled) == (step, 4, step == 8)
        assert 0 <= time.monotonic() - reading.since < 60
    place.at(Phase.EVALUATION)
    place.act(Action(Op.FORWARD, 0, 0))
    place.acted()
    assert where(slot) == Where(Phase.EVALUATION)


def test_a_stopped_or_dead_process_is_read_where_it_was() -> None:
    memory = mmap.mmap(-1, SLOT_BYTES)
    child = os.fork()
    if child == 0:
        place = Place(memory)
        place.step(3)
        place.act(Action(Op.WEIGHT_GRAD, 2, 5))
        os._exit(0)
    os.waitpid(child, 0)
    assert where(memory) == Where(Phase.ACTIONS, Op.WEIGHT_GRAD, False, 2, 5)


class Device:
    """Marks that are passed when the test says so."""

    def __init__(self) -> None:
        self.marks = self.passed = self.asked = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def done(self, mark: int) -> bool:
        self.asked += 1
        return mark <= self.passed


def test_on_a_device_a_mark_counts_when_the_device_has_come_there() -> None:
    slot, device = bytearray(SLOT_BYTES), Device()
    place = DevicePlace(device, slot, period_s=0)
    place.step(1)
    for microbatch in range(3):
        place.act(Action(Op.FORWARD, 0, microbatch))
    assert device.asked == 0, "the step itself asks nothing"
    assert not any(slot)
    device.passed = 3  # start, data, F of microbatch 0
    place.follow()
    assert where(slot) == Where(Phase.ACTIONS, Op.FORWARD, False, 0, 0)
    place.follow()
    assert where(slot) == Where(Phase.ACTIONS, Op.FORWARD, False, 0, 0)
    device.passed = device.marks
    place.follow()
    assert where(slot) == Where(Phase.ACTIONS, Op.FORWARD, False, 0, 2)
    place.at(Phase.TOTALS)
    place.follow()
    assert where(slot).phase is Phase.ACTIONS
    place.step(2)
    device.passed = device.marks
    place.follow()
    reading = Reading.of(memoryview(slot).cast("q"))
    assert (reading.step, reading.count) == (2, 1), "marks are counted, not readings"


def test_a_thread_follows_the_device_until_it_is_closed() -> None:
    slot, device = bytearray(SLOT_BYTES), Device()
    place = DevicePlace(device, slot, period_s=0.01)
    place.step(4)
    device.passed = device.marks
    deadline = time.monotonic() + 10
    while not any(slot) and time.monotonic() < deadline:
        time.sleep(0.01)
    place.close()
    assert where(slot) == Where(Phase.DATA)
