from __future__ import annotations

import pytest

from megalite.schedule.generators import SCHEDULES, build_schedule, forward_only
from megalite.schedule.lower import lower
from megalite.schedule.peaks import peak_memory
from megalite.schedule.render import parse_text
from megalite.schedule.validate import validate


def test_peaks_are_counted_along_the_list() -> None:
    plan = parse_text("rank 0: 0F0 0F1 0I0 0I1 0W0 0W1\nrank 1: 1F0 1I0 1F1 1I1 1W0 1W1")
    report = validate(lower(plan))
    assert report.peak_chunks == (2, 2)
    assert report.peak_in_flight == (2.0, 2.0)
    assert report.peak_open_w == (2.0, 2.0)
    assert report.peak_unsent == (2, 2)
    assert report.peak_receives == ({(1, "B"): 2}, {(0, "F"): 2})
    assert report.receive_buffers == (2, 2)


def test_two_chunks_on_a_rank_count_half_each() -> None:
    report = validate(lower(build_schedule("interleaved_1f1b", 2, 2, 2)))
    assert report.peak_chunks == (4, 3)
    assert report.peak_in_flight == (2.0, 1.5)


def test_evaluation_holds_one_activation_at_a_time() -> None:
    report = validate(lower(forward_only((0, 1, 0, 1), 8)))
    assert report.peak_chunks == (1, 1)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_receive_buffers_grow_with_channels_and_not_with_microbatches(name: str) -> None:
    virtual_stages = 3 if SCHEDULES[name].chunks == "any" else SCHEDULES[name].fewest
    for m in (9, 27):
        report = validate(lower(build_schedule(name, 3, m, virtual_stages)))
        for peaks, buffers in zip(report.peak_receives, report.receive_buffers, strict=True):
            assert buffers <= 2 * len(peaks) <= 8


def test_outputs_not_yet_taken_pile_up_at_the_sender_of_gpipe_alone() -> None:
    gpipe, one = (
        [max(validate(lower(build_schedule(name, 4, m))).peak_unsent) for m in (8, 32)]
        for name in ("gpipe", "1f1b")
    )
    assert gpipe[1] >= 32 and one[0] == one[1] <= 5


def test_memory_counts_each_stage_and_what_w_still_needs() -> None:
    plan = parse_text("rank 0: 0F0 0F1 0I0 0I1 0W0 0W1\nrank 1: 1F0 1I0 1F1 1I1 1W0 1W1")
    assert peak_memory(plan, (10.0, 7.0), (4.0, 1.0)) == (20.0, 8.0)
    assert peak_memory(lower(plan), (10.0, 7.0), (10.0, 7.0)) == (20.0, 14.0)
    whole = parse_text("rank 0: 0F0 3F0 3B0 0B0\nrank 1: 1F0 2F0 2B0 1B0")
    assert peak_memory(whole, (1.0, 2.0, 4.0, 8.0), (0.0,) * 4) == (9.0, 6.0)
