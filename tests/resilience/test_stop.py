from __future__ import annotations

from pathlib import Path

import pytest

from megalite.resilience.stop import VARIABLE, Control


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control"


def worker(path: Path, local_rank: int) -> Control:
    return Control.of_worker({VARIABLE: str(path), "LOCAL_RANK": str(local_rank)})


def test_a_stop_is_seen_by_every_worker_of_the_node(path: Path) -> None:
    launcher = Control.create(path, 2)
    workers = [worker(path, 0), worker(path, 1)]
    assert not any(w.stop for w in workers)
    launcher.ask_stop()
    assert all(w.stop for w in workers)
    launcher.ask_stop(False)
    assert not any(w.stop for w in workers)


def test_the_launcher_sees_how_far_each_worker_is(path: Path) -> None:
    launcher = Control.create(path, 2)
    first, second = worker(path, 0), worker(path, 1)
    launcher.begin(3, fits=True)
    assert (first.round, second.fits) == (3, True)
    first.stepped(7)
    assert launcher.steps == [7, 0] and launcher.times[0] > 1.7e9 and launcher.times[1] == 0
    first.mark_stopped()
    assert not launcher.stopped
    second.mark_stopped()
    assert launcher.stopped


def test_new_workers_begin_with_nothing_said_but_the_wish_to_stop(path: Path) -> None:
    launcher = Control.create(path, 1)
    launcher.ask_stop()
    only = worker(path, 0)
    only.stepped(7)
    only.mark_stopped()
    launcher.begin(4, fits=False)
    assert launcher.steps == [0] and not launcher.stopped and launcher.stop and not only.fits


def test_without_a_launcher_nobody_asks() -> None:
    alone = Control.of_worker({"LOCAL_RANK": "5"})
    alone.stepped(1)
    assert (alone.stop, alone.round, alone.fits, alone.steps) == (False, 0, False, [1])
