"""The watchdog: trainings in which a rank stops or loops, and what is said of it."""

from __future__ import annotations

import mmap
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch import watch
from launch.watch import FIRST_STEP_S, LONG_S, Board, Pace, Spec, Watchdog
from megalite.metrics import read_lines
from megalite.place import SLOT_BYTES, Phase, Place, Where
from megalite.resilience.stalls import UNSEEN, Seen
from megalite.schedule.action import Action, Op
from tests.launch.command import SMALL, TINY, Result, forked, launcher, metrics, run
from tests.launch.stalling import Planted, planting

WATCHED = [*TINY, *SMALL, "--run.watchdog_s", "2"]


def events(run_dir: Path, *names: str) -> list[dict[str, Any]]:
    return [e for e in read_lines(run_dir / "events.jsonl") if e["event"] in names]


def places(run_dir: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "rank", "phase", "stages", "action", "microbatch", "state")
    return [tuple(e.get(k) for k in keys) for e in events(run_dir, "stall")]


def watched(
    ranks: int, run_dir: Path, flags: list[str], *planted: Planted, **options: Any
) -> Result:
    words = [*WATCHED, "--run.dir", str(run_dir), *flags]
    return forked(ranks, words, change=planting(run_dir, *planted, **options))


def test_a_stopped_and_a_looping_rank_are_named_with_stage_action_and_microbatch(
    tmp_path: Path,
) -> None:
    flags = ["--parallel.tp", "2", "--parallel.pp", "2", "--train.steps", "12"]
    done = watched(
        4,
        tmp_path,
        flags,
        Planted(2, 3, "backward", 1),
        Planted(1, 5, "forward", 0),
        Planted(3, 7, "forward", 2, "loop"),
        Planted(0, 9, "data", how="loop"),
        # Slow, but no stall.
        Planted(3, 11, "forward", 0, "sleep", 0.8),
    )
    assert done.code == 0, done.output
    assert places(tmp_path) == [
        (3, 2, "actions", [1], "B", 1, "T"),
        (5, 1, "actions", [0], "F", 0, "T"),
        (7, 3, "actions", [1], "F", 2, "R"),
        (9, 0, "data", [0], None, None, "R"),
    ]
    told = events(tmp_path, "stall", "stall_over")
    assert [e["event"] for e in told] == ["stall", "stall_over"] * 4
    assert all(1.0 < e["since_s"] < 10.0 for e in events(tmp_path, "stall"))
    texts = [e["text"] for e in events(tmp_path, "stall")]
    head = "step 3 stalls: rank 2 (stage 1, tp 0) is in B of microbatch 1 since"
    assert texts[0].startswith(head)
    assert "rank 0 (stage 0, tp 0) waits for B of microbatch 1 from rank 2" in texts[0]
    assert "rank 0 (stage 0, tp 0) is in F of microbatch 0 and waits for rank 1" in texts[1]
    stacks = [e["stack"] for e in events(tmp_path, "stall")]
    assert stacks[:2] == ["", ""] and all("stalling.py" in stack for stack in stacks[2:])
    assert all(text.splitlines()[0] in done.output for text in texts)
    assert len(metrics(tmp_path)) == 12


def test_replicas_on_two_nodes_are_told_of_once_and_a_long_save_not_at_all(tmp_path: Path) -> None:
    flags = ["--train.steps", "8", "--checkpoint.every", "6", "--parallel.zero1", "True"]
    done = watched(
        2,
        tmp_path,
        flags,
        Planted(1, 3, "reduction"),
        Planted(0, 5, "totals"),
        Planted(1, 6, "save", how="sleep", sleep_s=4.0),
        each_a_node=True,
    )
    assert done.code == 0, done.output
    assert places(tmp_path) == [
        (3, 1, "reduction", [0], None, None, "T"),
        (5, 0, "totals", [0], None, None, "T"),
    ]
    text = events(tmp_path, "stall")[0]["text"]
    assert "rank 0 (stage 0, dp 0) is in" in text and "waits for rank 1" in text
    assert len(events(tmp_path, "stall_over")) == 2
    assert not (tmp_path / "watch").exists()
    assert len(metrics(tmp_path)) == 8


@pytest.mark.full
@pytest.mark.parametrize("elastic", [False, True], ids=["torchrun", "elastic"])
def test_any_launcher_has_a_watchdog_that_lives_by_the_default(
    elastic: bool, tmp_path: Path
) -> None:
    start = [sys.executable, "launch/elastic.py", "--standalone", "--nproc-per-node", "2"]
    script = ["tests/launch/stalled_training.py", *TINY, *SMALL, "--run.dir", str(tmp_path)]
    flags = ["--parallel.pp", "2", "--train.steps", "6", "--run.watchdog_s", "10"]
    done = run([*(start if elastic else launcher(2)), *script, *flags])
    assert done.code == 0, done.output
    assert places(tmp_path) == [(4, 1, "actions", [1], "B", 2, "T")]
    (told,) = events(tmp_path, "stall")
    assert told["text"] in done.output and told["since_s"] < 12.0
    assert len(events(tmp_path, "stall_over")) == 1 and len(metrics(tmp_path)) == 6


@pytest.mark.parametrize("how", ["note", "kill"])
def test_the_watchdog_ends_with_its_rank(how: Any, tmp_path: Path) -> None:
    done = watched(1, tmp_path, ["--train.steps", "3"], Planted(0, 2, "data", how=how))
    assert done.code == (0 if how == "note" else -signal.SIGKILL)
    (child,) = map(int, (tmp_path / "children").read_text().split())
    deadline = time.monotonic() + 10
    while _is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(child)
    assert not events(tmp_path, "stall")


def _is_alive(pid: int) -> bool:
    """Whether it is a watchdog and runs: its number may belong to another one by now."""
    try:
        return "watch.py" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def test_a_slow_replica_is_named_as_a_straggler(tmp_path: Path) -> None:
    flags = ["--train.steps", "13", "--run.trace", "True", "--train.global_batch_size", "4"]
    slow = [Planted(1, 0, "forward", m, "sleep", 0.15) for m in range(2)]
    done = watched(2, tmp_path, flags, *slow, look_every=2)
    assert done.code == 0, done.output
    (found,) = events(tmp_path, "straggler")
    assert found["rank"] == 1 and found["ratio"] > 1.5
    assert found["text"] in done.output and not events(tmp_path, "stall")


F0 = Where(Phase.ACTIONS, Op.FORWARD, False, 0, 0)


def test_what_was_slow_before_is_no_stall() -> None:
    pace, seen = Pace(10.0), Seen(5, F0, 3, 14.0)
    assert pace.is_late(seen)
    pace.passed(replace(F0, microbatch=7), 5.0)
    assert not pace.is_late(seen) and pace.is_late(replace(seen, age_s=15.1))
    assert pace.is_late(replace(seen, where=replace(F0, waits=True))), "waiting is another kind"


def test_the_first_step_and_long_phases_are_given_more_time() -> None:
    pace = Pace(10.0)
    first = Seen(1, F0, 3, FIRST_STEP_S, settled=False)
    assert not pace.is_late(first) and pace.is_late(replace(first, age_s=FIRST_STEP_S + 11))
    assert pace.is_late(replace(first, settled=True))
    for phase, long_s in LONG_S.items():
        seen = Seen(9, Where(phase), 3, long_s + 9.0)
        assert not pace.is_late(seen) and pace.is_late(replace(seen, age_s=long_s + 11.0))


def board(run_dir: Path, node: int, token: str = "a") -> Board:
    axes = {"tp": 1, "pp": 2, "dp": 1, "order": ("pp", "dp", "tp")}
    return Board(Spec(1, str(run_dir), token, 10.0, [0, 1], node, [], axes, [0, 1], False))


def test_nodes_see_each_others_ranks_and_the_first_that_is_not_silent_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = board(tmp_path, 0), board(tmp_path, 1)
    seen = Seen(5, F0, 3, 2.0, "D", "nfs_wait", "a stack", settled=False)
    assert first.others() == ({}, True)
    first.publish({0: seen}, 100.0)
    second.publish({1: seen}, 100.0)
    others, reports = first.others()
    assert list(others) == [1] and reports
    at_once = others[1]
    assert replace(at_once, age_s=2.0, unseen_s=0.0) == seen and at_once.age_s < 10
    assert second.others()[1] is False
    assert board(tmp_path, 1, "b").others() == ({}, True), "of another start of the job"
    later = time.time() + 44.0
    monkeypatch.setattr(watch, "time", SimpleNamespace(time=lambda: later))
    others, reports = second.others()
    assert reports and others[0].state == UNSEEN and 44 <= others[0].unseen_s < 60
    first.close()
    assert (tmp_path / "watch").exists()
    second.close()
    assert not (tmp_path / "watch").exists()


class Clock:
    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Watchdog, Place, Clock, list[str]]]:
    """A watchdog of this process alone, on a clock that can be put forward."""
    clock, slot, told = Clock(), os.memfd_create("place"), list[str]()
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=clock.monotonic, time=time.time))
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    os.truncate(slot, SLOT_BYTES)
    place = Place(mmap.mmap(slot, SLOT_BYTES))
    axes = {"tp": 1, "pp": 1, "dp": 1, "order": ("pp", "dp", "tp")}
    ranks = [[0, os.getpid(), slot, slot]]
    spec = Spec(os.getpid(), str(tmp_path), "", 10.0, [0], 0, ranks, axes, [0], False)
    place.step(1)
    watchdog = Watchdog(spec, told.append, lambda name, fields: told.append(name))
    yield watchdog, place, clock, told
    watchdog.close()
    signal.signal(signal.SIGUSR2, before)
    os.close(slot)


def look(watchdog: Watchdog, clock: Clock, seconds: float) -> None:
    """As often as it would in that time."""
    for _ in range(round(seconds / watchdog.period_s)):
        clock.ahead += watchdog.period_s
        watchdog.look()


def test_a_stall_is_told_once_and_again_when_it_moves_or_ends(alone: Any) -> None:
    watchdog, place, clock, told = alone
    look(watchdog, clock, 2)
    clock.ahead = 0.0
    place.step(2)
    place.act(Action(Op.FORWARD, 0, 3))
    look(watchdog, clock, 30)
    assert [t for t in told if t in ("stall", "stall_over")] == ["stall"]
    assert re.search(r"rank 0 \(stage 0\) is in F of microbatch 3 since (9|10) s", told[0])
    clock.ahead = 0.0
    place.act(Action(Op.BACKWARD, 0, 3))
    look(watchdog, clock, 2)
    assert [t for t in told if t in ("stall", "stall_over")] == ["stall", "stall_over"]


def test_a_pause_of_the_watchdog_itself_is_no_stall(alone: Any) -> None:
    """As when all processes of the job are stopped and continued."""
    watchdog, place, clock, told = alone
    look(watchdog, clock, 2)
    place.step(2)
    watchdog.look()
    clock.ahead += 1000.0
    look(watchdog, clock, 8)
    assert not told
    look(watchdog, clock, 8)
    assert "stall" in told
