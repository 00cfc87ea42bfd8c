"""A request reaches the job once, and its answer the one who asked."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from launch.request import ANSWER, KEPT_S, REQUEST, Mailbox, ask, parse, wait_for_answer
from megalite.metrics import RunLock, is_locked


def test_a_request_is_taken_once_and_answered(tmp_path: Path) -> None:
    box = Mailbox(tmp_path, True)
    assert not box.is_full() and parse(box.take()) is None
    request = ask(tmp_path, {"tp": "2"})
    assert box.is_full()
    assert parse(box.take()) == request
    assert not box.is_full() and box.take() == ""
    assert wait_for_answer(tmp_path, request, 0.0) is None
    timer = threading.Timer(0.2, box.answer, (request, True, "done"))
    timer.start()
    answer = wait_for_answer(tmp_path, request, 10.0)
    timer.join()
    assert answer is not None and answer.done and answer.text == "done"
    other = ask(tmp_path, {"tp": "2"})
    assert wait_for_answer(tmp_path, other, 0.0) is None  # that was another's answer


def test_a_run_that_ends_answers_what_it_has_not_read(tmp_path: Path) -> None:
    box = Mailbox(tmp_path, True)
    request = ask(tmp_path, {"tp": "2"})
    box.close()
    answer = wait_for_answer(tmp_path, request, 0.0)
    assert answer is not None and not answer.done and "ended" in answer.text


def test_a_request_that_is_cut_off_is_taken_once_more_and_then_dropped(tmp_path: Path) -> None:
    request = ask(tmp_path, {"tp": "2"})
    assert parse(Mailbox(tmp_path, True).take()) == request
    for box in (Mailbox(tmp_path, True), Mailbox(tmp_path, True)):  # started, and again at once
        assert box.is_full() and not box.dropped
    assert parse(box.take()) == request and not box.is_full()
    box.answer(request, True, "done")
    third = Mailbox(tmp_path, True)
    assert not third.is_full() and third.take() == ""
    assert third.dropped == [
        "a request for tp=2 was cut off twice by failures of the job: it is dropped"
    ]
    answer = wait_for_answer(tmp_path, request, 0.0)
    assert answer is not None and not answer.done and answer.text == third.dropped[0]
    assert not Mailbox(tmp_path, True).dropped


def test_a_request_that_was_met_or_refused_is_not_taken_again(tmp_path: Path) -> None:
    for end in ("saved", "refused", "restored"):
        request = ask(tmp_path, {"tp": "2"})
        box = Mailbox(tmp_path, True)
        assert parse(box.take()) == request
        if end == "saved":
            box.answer(request, True, "done")
            box.settle()
        elif end == "refused":
            box.answer(request, False, "no")
        after = Mailbox(tmp_path, True, ({"tp": "2"} if end == "restored" else {}).__eq__)
        assert not after.is_full() and not after.dropped
        answer = wait_for_answer(tmp_path, request, 0.0)
        assert answer is not None and answer.done == (end != "refused")


def test_a_save_before_a_request_is_taken_again_does_not_lose_it(tmp_path: Path) -> None:
    request = ask(tmp_path, {"tp": "2"})
    Mailbox(tmp_path, True).take()
    box = Mailbox(tmp_path, True)
    box.settle()  # of a step that came before the request was looked at
    assert box.is_full() and parse(box.take()) == request


def test_one_request_does_not_touch_another(tmp_path: Path) -> None:
    first = ask(tmp_path, {"tp": "2"})
    Mailbox(tmp_path, True).take()
    box = Mailbox(tmp_path, True)
    assert parse(box.take()) == first  # again
    second = ask(tmp_path, {"pp": "2"})
    assert parse(box.take()) == second
    box = Mailbox(tmp_path, True)  # both were cut off: the first twice
    assert len(box.dropped) == 1 and "tp=2" in box.dropped[0]
    assert parse(box.take()) == second and not box.is_full()


def test_requests_before_one_that_the_job_has_are_not_made_again(tmp_path: Path) -> None:
    box = Mailbox(tmp_path, True)
    for values in ({"tp": "2"}, {"tp": "1"}):
        ask(tmp_path, values)
        box.take()
    assert Mailbox(tmp_path, True, {"tp": "2"}.__eq__).is_full(), "the second is still to come"
    assert not Mailbox(tmp_path, True, {"tp": "1"}.__eq__).is_full()


def test_a_request_of_long_ago_is_dropped_and_only_one_rank_reads(tmp_path: Path) -> None:
    request = ask(tmp_path, {"tp": "2"})
    other = Mailbox(tmp_path, False)
    assert not other.is_full() and other.take() == "" and (tmp_path / REQUEST).exists()
    assert Mailbox(tmp_path, True).is_full(), "it came while the job was restarted"
    long_ago = time.time() - 2 * KEPT_S
    os.utime(tmp_path / REQUEST, (long_ago, long_ago))
    box = Mailbox(tmp_path, True)
    assert not box.is_full() and "older than 600 s" in box.dropped[0]
    answer = wait_for_answer(tmp_path, request, 0.0)
    assert answer is not None and not answer.done


@pytest.mark.parametrize("text", ["", "[]", "{", '{"parallel": 3}', "\x00"])
def test_what_is_no_request_is_ignored(text: str, tmp_path: Path) -> None:
    box = Mailbox(tmp_path, True)
    (tmp_path / REQUEST).write_text(text)
    assert parse(box.take()) is None
    assert not (tmp_path / REQUEST).exists() and not (tmp_path / ANSWER).exists()


def test_a_directory_is_locked_while_a_run_writes_there(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    lock = RunLock(tmp_path)
    assert is_locked(tmp_path)
    lock.close()
    assert not is_locked(tmp_path)
