"""Kills from outside, at random times and aimed at phases, with a fixed seed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

from launch.request import Request, wait_for_answer
from megalite.errors import ConfigError
from tests.faults.job import Host, Job, family, is_alive, kill
from tests.faults.phases import (
    CHANGES,
    RESTARTS,
    SAVES,
    Leftovers,
    Phase,
    Places,
    died_in,
    leftovers,
)
from tools.reconfigure import make_request

LAYOUTS = {
    "tp 2 x pp 1 x dp 1, 1f1b": "tp=2,pp=1,schedule=1f1b,virtual_stages=1,zero1=False",
    "tp 1 x pp 1 x dp 2, 1f1b": "tp=1,pp=1,schedule=1f1b,virtual_stages=1,zero1=True",
    "tp 1 x pp 2 x dp 1, 1f1b": "tp=1,pp=2,schedule=1f1b,virtual_stages=1,zero1=False",
    "tp 1 x pp 2 x dp 1, zb_v": "tp=1,pp=2,schedule=zb_v,virtual_stages=2,zero1=False",
}
"""Of two ranks, with the fields that lead there from any other."""
FIRST = ["--parallel.tp", "2"]
AIMS: Sequence[Phase] = (Phase.TRAIN, *SAVES, *CHANGES, *RESTARTS)


def changes(every: int, last: int) -> list[str]:
    """The flag of a change of layout after each ``every`` steps."""
    fields = list(LAYOUTS.values())
    steps = range(every, last, every)
    entries = [f"{step}:{fields[(n + 1) % len(fields)]}" for n, step in enumerate(steps)]
    return ["--parallel.reconfigure", *entries]


def changes_in(layouts: Sequence[str]) -> list[str]:
    """The flag with which a run has these layouts, step by step."""
    pairs = enumerate(zip(layouts, layouts[1:], strict=False), 1)
    entries = [f"{step}:{LAYOUTS[after]}" for step, (before, after) in pairs if before != after]
    return ["--parallel.reconfigure", *entries] if entries else []


@dataclass(frozen=True)
class Blow:
    """A kill: of what, in which phase that was, and how long until all ranks stepped again; 0:
    another one came before."""

    target: str
    phase: Phase
    seconds: float


@dataclass
class Rain:
    """Kills that fall on a job."""

    job: Job
    rng: random.Random
    places: Places = field(default_factory=Places)
    known: Leftovers = field(default_factory=dict)
    asked: list[Request] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def fall(self, targets: Sequence[str], aims: Sequence[Phase]) -> Iterator[Blow]:
        """Kill each target once, in that phase if it can be met.

        A blow at a restart needs one before it, which counts as well; targets are then taken two
        by two.
        """
        self.job.wait_for_steps(0.0)
        left, chosen = list(targets), list(aims)
        while left:
            aim = chosen.pop(0)
            time.sleep(self.rng.uniform(0, 0.4))
            restarts = aim in RESTARTS and len(left) > 1
            first = Phase.TRAIN if aim in RESTARTS else aim
            target = left.pop(0)
            phase, struck, old = self._strike(target, first, set())
            if restarts:
                yield Blow(target, phase, 0.0)
                target = left.pop(0)
                phase, struck, more = self._strike(target, aim, set(old))
                old += more
            gone = wait_until_gone(old, target)
            yield Blow(target, phase, gone - struck + self.job.wait_for_steps(gone))

    def _strike(self, target: str, aim: Phase, old: set[int]) -> tuple[Phase, float, list[int]]:
        """Kill one thing of one host, none of it of ``old``: the phase that it met, when that was,
        and what must be gone soon after."""
        job, rng = self.job, self.rng
        host = rng.choice(job.hosts)
        if aim in CHANGES:
            self._ask()
        give_up = time.monotonic() + 15
        while True:
            workers = [pid for pid in host.workers() if pid not in old]
            # Only rank 0 commits; what it does between two steps of that is over in no time.
            first = workers[:1] if aim is Phase.WRITTEN else workers
            pids = victims(host, target, first, rng)
            whole = target in ("agent", "host")
            doomed = family(host.pid()) if whole else family(host.forkserver())[1:]
            missed = time.monotonic() > give_up
            if pids and (missed or self._comes(aim, workers)):
                break
            assert not job.supervise(), "the job is over"
            assert time.monotonic() < give_up + 30, job.logs()
            time.sleep(0.0003)
        struck = time.time()
        for pid in pids:
            kill(pid)
        doomed += pids
        wait_until_gone([pid for pid in workers if target != "worker" or pid in pids], target)
        phase = self._died_in([pid for pid in workers if pid in pids] or workers)
        return phase, struck, doomed

    def _comes(self, aim: Phase, workers: list[int], patience_s: float = 0.1) -> bool:
        """Whether the job comes to a phase right away; looked at without a pause."""
        give_up = time.monotonic() + patience_s
        while not (seen := self._sees(aim, [self.places.of(pid) for pid in workers])):
            if time.monotonic() > give_up:
                break
        return seen

    def _sees(self, aim: Phase, places: list[Phase]) -> bool:
        """Whether the job is in a phase right now; a moment later it may be in the next."""
        if aim is Phase.TRAIN:
            return True
        if aim in SAVES:
            found = leftovers(self.job.run_dir / "checkpoints")
            return any(p is aim for key, p in found.items() if self.known.get(key) != p)
        return aim in places

    def _died_in(self, workers: list[int]) -> Phase:
        found = leftovers(self.job.run_dir / "checkpoints")
        phase = died_in(found, self.known, [self.places.of(pid) for pid in workers])
        self.known = found
        return phase

    def _ask(self) -> None:
        """Half of the time, ask the running job for another layout, if nothing is asked already."""
        if self.rng.random() < 0.5 or not self.answered():
            return
        fields = self.rng.choice([*LAYOUTS.values()]).split(",")
        with suppress(ConfigError):  # it is not there right now
            flags = [f"--parallel.{entry}" for entry in fields]
            self.asked.append(make_request(self.job.run_dir, flags))

    def answered(self) -> bool:
        """Whether every request has its answer."""
        if len(self.answers) == len(self.asked):
            return True
        answer = wait_for_answer(self.job.run_dir, self.asked[-1], 0.0)
        if answer is not None:
            self.answers.append(answer.text)
        return answer is not None


def victims(host: Host, target: str, workers: list[int], rng: random.Random) -> list[int]:
    """What a blow at ``target`` kills; empty while there is no such process."""
    if target == "worker":
        return [rng.choice(workers)] if workers else []
    whole = [host.launcher(), host.forkserver()]
    found = {"forkserver": whole[1:], "agent": whole[:1]}
    pids = found.get(target, [*whole, *workers])
    return pids if all(pids) else []


def wait_until_gone(pids: list[int], target: str) -> float:
    """When nothing of the old attempt was alive any more."""
    deadline = time.monotonic() + 10
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"{left} are alive after a kill of {target}"
        time.sleep(0.001)
    return time.time()


def show(found: Sequence[Blow]) -> None:
    """How many blows met which phase, and the distribution of recovery times."""
    for name in ("phase", "target"):
        kinds = sorted({str(getattr(blow, name)) for blow in found})
        for kind in kinds:
            blows = [blow for blow in found if str(getattr(blow, name)) == kind]
            times = sorted(blow.seconds for blow in blows if blow.seconds)
            print(f"{kind:40} {len(blows):4} kills{spread(times)}")
    print(f"{'all':40} {len(found):4} kills{spread(sorted(b.seconds for b in found if b.seconds))}")


def spread(times: list[float]) -> str:
    if not times:
        return ""
    deciles = " ".join(f"{times[(len(times) - 1) * n // 10]:.2f}" for n in range(11))
    return f"; stepping again after {median(times):.2f} s (deciles {deciles})"
