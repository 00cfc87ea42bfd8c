"""Who waits for whom: from where every rank stands to the one that all wait for, in words.

Pure: it is given what was seen of the ranks. A rank that waits for a message waits for the rank
that sends it; one in a collective for the members that have not come there yet, or cannot come.
Whoever waits for nobody and has been there for too long holds up the rest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megalite.mesh_shape import MeshShape
from megalite.place import Phase, Where
from megalite.schedule.action import COMPUTE, Op

MOST_LINES = 8
UNSEEN = "unseen"
"""The state of a process whose host has said nothing for too long; the others are those of
``/proc/PID/stat``, and X if there is none."""
_STATES = {
    "R": "its process runs",
    "S": "its process sleeps",
    "D": "its process is in the kernel and cannot be interrupted",
    "T": "its process is stopped (SIGSTOP)",
    "t": "its process is held by a debugger",
    "Z": "its process is dead",
    "X": "its process is gone",
    UNSEEN: "its host is silent",
}
_CANNOT_RUN = set("TtZX") | {UNSEEN}
_PHASES = {
    Phase.START: "at the start of the run",
    Phase.DATA: "in the loading of data",
    Phase.ACTIONS: "in the pipeline's actions",
    Phase.REDUCTION: "in the reduction of gradients",
    Phase.TOTALS: "in the totals of the step",
    Phase.OPTIMIZER: "in the optimizer",
    Phase.RECORD: "in the record of the step",
    Phase.BETWEEN: "between two steps",
    Phase.SAVE: "in a save",
    Phase.EVALUATION: "in an evaluation",
    Phase.SAMPLING: "in the sampling of text",
    Phase.CHANGE: "in a change of layout, of which nothing has moved yet",
    Phase.MOVE: "in a change of layout, while the state moves",
    Phase.CHANGED: "in a change of layout, after the state has moved",
    Phase.END: "at the end of the run",
}
# Where the other end of a message stands, in stages; of a computation, that for which it waits.
_SENDER = {Op.FORWARD: -1, Op.BACKWARD: 1, Op.INPUT_GRAD: 1}
_TAKER = {Op.WAIT_F: 1, Op.WAIT_B: -1}
_OWN = {Phase.ACTIONS, Phase.DATA, Phase.OPTIMIZER, Phase.REDUCTION}


@dataclass(frozen=True)
class Seen:
    """A rank as it was seen.

    Attributes:
        count: of marks in the step; ``age_s``: how long ago the last was made.
        state: of its process; ``wchan``: where in the kernel that is.
        stack: of its Python threads, as ``faulthandler`` writes it; empty: not asked, or no answer.
        unseen_s: how long ago this was seen.
        settled: the rank has made a step since the start.
    """

    step: int
    where: Where
    count: int
    age_s: float
    state: str = "S"
    wchan: str = ""
    stack: str = ""
    unseen_s: float = 0.0
    settled: bool = True

    @property
    def cannot_run(self) -> bool:
        return self.state in _CANNOT_RUN

    @property
    def begun(self) -> tuple[int, int]:
        return self.step, self.where.phase


@dataclass(frozen=True)
class Stall:
    """One rank holds up others, or all wait for each other.

    Attributes:
        rank: the one; ``seen``: where it stands. text: at most 8 lines, the rank in the first.
        stack: where its Python code is.
    """

    rank: int
    seen: Seen
    text: str
    stack: str
    stages: tuple[int, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """What has changed if another report is due."""
        return self.rank, self.seen.step, self.seen.where, self.seen.cannot_run

    @property
    def fields(self) -> dict[str, Any]:
        """Of the event."""
        where, action = self.seen.where, self.seen.where.action
        found: dict[str, Any] = {"step": self.seen.step, "rank": self.rank}
        found |= {"phase": where.phase.name.lower(), "stages": list(self.stages)}
        if action is not None:
            found |= {"action": action.op.value, "stage": action.stage}
            found |= {"microbatch": action.microbatch, "waits": where.waits}
        found |= {"since_s": round(self.seen.age_s, 1), "state": self.seen.state}
        return {**found, "text": self.text, "stack": self.stack}


@dataclass(frozen=True)
class Job:
    """What does not change while the ranks are where they are seen.

    Attributes:
        rank_of: the pipeline rank of each stage.
        tied: the first and the last stage sum gradients of a shared embedding.
    """

    shape: MeshShape
    rank_of: tuple[int, ...]
    tied: bool = False

    @cached_property
    def lines(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """By axis, the members of each rank's group."""
        axes = ("tp", "pp", "dp")
        return {a: {r: g for g in self.shape.groups(a) for r in g} for a in axes}

    def holder(self, stage: int, rank: int) -> int | None:
        """The rank that has ``stage`` in the pipeline of ``rank``."""
        if not 0 <= stage < len(self.rank_of):
            return None
        return self.shape.rank({**self.shape.coords(rank), "pp": self.rank_of[stage]})

    def stages(self, rank: int) -> tuple[int, ...]:
        pp = self.shape.coords(rank)["pp"]
        return tuple(s for s, r in enumerate(self.rank_of) if r == pp)

    def name(self, rank: int, where: Where | None = None) -> str:
        """Such as ``rank 5 (stage 2, tp 1)``."""
        at = self.shape.coords(rank)
        stages = self.stages(rank) if where is None or where.stage < 0 else (where.stage,)
        text = f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"
        axes = [f"{a} {at[a]}" for a in ("tp", "dp") if self.shape.size(a) > 1]
        return f"rank {rank} ({', '.join([text, *axes])})"


def peer_of(job: Job, rank: int, where: Where) -> int | None:
    """The rank at the other end of the message for which a rank waits, if it waits for one."""
    if where.op is None:
        return None
    towards = _SENDER.get(where.op) if where.waits else _TAKER.get(where.op)
    return None if towards is None else job.holder(where.stage + towards, rank)


def _in_all(seen: Seen) -> bool:
    """Whether a rank is in a phase in which all meet all."""
    return seen.where.op is None and seen.where.phase not in _OWN and not seen.cannot_run


def edges_of(job: Job, seen: Mapping[int, Seen]) -> dict[int, list[int]]:
    """For whom each rank waits; where all meet, for those only that are the cause of it."""
    edges = {r: blockers(job, seen, r) for r, s in seen.items() if not _in_all(s)}
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(set(seen) - set(edges)):
        groups.setdefault(seen[rank].begun, []).append(rank)
    for begun in sorted(groups):
        behind = [r for r in sorted(seen) if seen[r].cannot_run or seen[r].begun < begun]
        ends = [r for r in behind if not edges[r]]
        edges |= dict.fromkeys(groups[begun], ends or behind)
    return edges


def blockers(job: Job, seen: Mapping[int, Seen], rank: int) -> list[int]:
    """The ranks of its axes for which a rank waits, as far as can be told from where all stand."""
    mine = seen[rank]
    if mine.cannot_run:
        return []
    peer = peer_of(job, rank, mine.where)
    if peer is not None:
        return [peer] if peer in seen else []
    tp, dp = job.lines["tp"][rank], job.lines["dp"][rank]
    if mine.where.phase is not Phase.REDUCTION:
        # It may wait for its tp group inside of an action, for weights from its replicas too.
        late = [r for r in tp if r in seen and _is_behind(seen[r], mine)]
        late += [r for r in dp if r in seen and seen[r].step < mine.step]
        dead = [r for r in {*tp, *dp} & set(seen) if seen[r].cannot_run]
        return sorted({*late, *dead})
    pp = job.lines["pp"][rank]
    tie = {pp[0], pp[-1]} if job.tied and rank in (pp[0], pp[-1]) else set()
    others = sorted({*tp, *dp, *tie} & set(seen) - {rank})
    return [r for r in others if seen[r].cannot_run or seen[r].begun < mine.begun]


def _is_behind(other: Seen, mine: Seen) -> bool:
    """Of two ranks with the same actions."""
    return (*other.begun, other.count) < (*mine.begun, mine.count)


def find(job: Job, seen: Mapping[int, Seen], is_late: Callable[[Seen], bool]) -> Stall | None:
    """The rank that holds up the others, if one has been at its place for too long.

    A rank that waits is never the one, however long, unless all that it waits for do so in turn.

    Args:
        is_late: whether a rank is longer at its place than it should ever be.
    """
    edges = edges_of(job, seen)
    late = {rank for rank, s in seen.items() if is_late(s)}
    reached: Counter[int] = Counter()
    circles: set[int] = set()
    for rank in late:
        found = _reach(edges, rank)
        ends = [r for r in found if not edges[r]]
        reached.update(ends)
        if not ends and found <= late:
            circles |= found
    roots = [rank for rank in reached if rank in late]
    if not roots:
        roots = sorted(circles)
    if not roots:
        return None
    stuck = [r for r in roots if not waits_by_stack(seen[r].stack)] or roots
    root = min(
        stuck,
        key=lambda r: (not seen[r].cannot_run, -reached[r], seen[r].begun, -seen[r].age_s, r),
    )
    # What only the stacks tell: these wait for the root inside of an action or a phase.
    edges |= {r: [root] for r in roots if r not in stuck}
    rest, note = [r for r in stuck if r != root], ""
    if rest and root in circles:
        note = f"; it and {_ranks(rest)} wait for each other"
    elif rest and not seen[root].cannot_run:
        note = f"; the same holds for {_ranks(rest)}"
    return _stall(job, seen, edges, root, note)


def _reach(edges: Mapping[int, list[int]], start: int) -> set[int]:
    found, queue = {start}, [start]
    while queue:
        fresh = set(edges[queue.pop()]) - found
        found |= fresh
        queue += fresh
    return found


_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
_WAITING = ("/torch/distributed/", "/megalite/collectives.py", "/megalite/mesh.py")
_CALLS = ("wait(", ".tolist(", ".item(", "synchronize(")


def waits_by_stack(stack: str, read: Callable[[str, int], str] | None = None) -> bool:
    """Whether the main thread of a stack is inside of a collective or the wait for one.

    Args:
        read: a line of a source file; by default from the disk.
    """
    frames = _FRAME.findall(main_thread(stack))
    if not frames:
        return False
    file, line, _ = frames[0]
    if any(part in file for part in _WAITING):
        return True
    text = (read or _source_line)(file, int(line))
    return any(call in text for call in _CALLS)


def _source_line(file: str, number: int) -> str:
    import linecache

    return linecache.getline(file, number)


def main_thread(stack: str) -> str:
    """The last of the threads that ``faulthandler`` lists: the first that the process had."""
    return re.split(r"\n\s*\n", stack.strip())[-1]


def _stall(
    job: Job,
    seen: Mapping[int, Seen],
    edges: Mapping[int, list[int]],
    root: int,
    note: str,
) -> Stall:
    mine = seen[root]
    head = f"step {mine.step} stalls: {_sentence(job, seen, edges, root)}; {_STATES[mine.state]}"
    head += f" ({mine.wchan})" if mine.wchan else ""
    if mine.cannot_run and mine.state != UNSEEN:
        head += " and cannot show its stack"
    lines = [head + note, *_waiters(job, seen, edges, root)]
    if len(lines) > MOST_LINES:
        left = len(lines) - MOST_LINES + 1
        lines = [*lines[: MOST_LINES - 1], f"  and so on: {left} more such lines"]
    stack = main_thread(mine.stack)
    return Stall(root, mine, "\n".join(lines), stack, job.stages(root))


def _waiters(
    job: Job, seen: Mapping[int, Seen], edges: Mapping[int, list[int]], root: int
) -> Iterator[str]:
    """A line for the ranks that stand alike: first those that wait for the root itself."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for rank in sorted(seen):
        if rank != root:
            far = root not in edges[rank]
            groups.setdefault((far, _doing(job, seen, edges, rank)), []).append(rank)
    for (_, doing), ranks in sorted(groups.items(), key=lambda item: (item[0][0], item[1])):
        if doing:
            who = job.name(ranks[0], seen[ranks[0]].where) if len(ranks) == 1 else _ranks(ranks)
            verb = doing if len(ranks) == 1 else _plural(doing)
            yield f"  {who} {verb}"


def _sentence(job: Job, seen: Mapping[int, Seen], edges: Mapping[int, list[int]], rank: int) -> str:
    mine = seen[rank]
    return f"{job.name(rank, mine.where)} {_doing(job, seen, edges, rank)} since {mine.age_s:.0f} s"


def _doing(job: Job, seen: Mapping[int, Seen], edges: Mapping[int, list[int]], rank: int) -> str:
    """What a rank does or waits for, and what is known of whom it waits for."""
    mine = seen[rank]
    if mine.state == UNSEEN:
        return f"last seen {mine.unseen_s:.0f} s ago"
    text = "is " + _place(mine.where)
    peer, waits_for = peer_of(job, rank, mine.where), edges[rank]
    if peer is not None:
        assert mine.where.op is not None
        op = mine.where.op.value.removeprefix("WAIT_")
        what = f"{op} of microbatch {mine.where.microbatch}"
        text = f"waits for {what} from rank {peer}"
        if mine.where.op in _TAKER:
            text = f"waits until rank {peer} has taken {what}"
    elif waits_for:
        text += f" and waits for {_ranks(waits_for)}"
    if len(waits_for) == 1 and mine.where.op is not None and not edges[waits_for[0]]:
        other = seen[waits_for[0]]
        text += f", which is {_place(other.where)} since {other.age_s:.0f} s"
    return text


def _place(where: Where) -> str:
    if where.op is None:
        return _PHASES[where.phase]
    text = f"in {where.op.value}"
    if where.op in COMPUTE or where.op is not Op.REDUCE:
        text += f" of microbatch {where.microbatch}"
    return text if where.phase is Phase.ACTIONS else f"{text} {_PHASES[where.phase]}"


def _plural(doing: str) -> str:
    """A sentence about one rank as one about several."""
    first, _, rest = doing.partition(" ")
    rest = rest.replace("and waits for", "and wait for")
    return {"is": "are", "waits": "wait"}.get(first, first) + " " + rest


def _ranks(ranks: list[int]) -> str:
    """Such as ``ranks 0-3 and 7``, or ``rank 2``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    shown = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[1]}" for r in runs]
    if len(ranks) == 1:
        return f"rank {shown[0]}"
    if len(shown) > 8:
        return f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"ranks {text}"
