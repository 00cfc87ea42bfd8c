"""A request reaches the job once, and its answer the one who asked."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from launch.request import ANSWER, REQUEST, Mailbox, ask, parse, wait_for_answer
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


def test_an_old_request_is_thrown_away_and_only_one_rank_reads(tmp_path: Path) -> None:
    ask(tmp_path, {"tp": "2"})
    other = Mailbox(tmp_path, False)
    assert not other.is_full() and other.take() == "" and (tmp_path / REQUEST).exists()
    assert not Mailbox(tmp_path, True).is_full()


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
