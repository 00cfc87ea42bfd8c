"""Pipeline schedules against ``torch.distributed.pipelining``, and against theory."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.mesh import Mesh, Transport
from megalite.mesh_shape import MeshShape
from megalite.schedule.action import Plan
from megalite.schedule.generators import SCHEDULES, build_schedule
from megalite.schedule.lower import lower
from megalite.schedule.simulate import simulate
from megalite.schedule.validate import validate
from tools.benches import gpt
from tools.benches.clock import Contestant, slowest, time_in_turn
from tools.benches.ranks import run_ranks
from tools.benches.rows import Goal, Row, Sample
from tools.benches.sleep import PEERS, Times, floor, ours, torch_step

MICROBATCHES = 16
TIMES = Times(0.010, 0.010, 0.010)
REPETITIONS = 7
CHUNKS = {"interleaved_1f1b": 2, "looped_bfs": 2, "zb_v": 2, "dualpipe_v": 2}
RACES = {
    4: ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_v", "dualpipe_v"),
    8: ("1f1b", "zb_h1", "zb_v", "dualpipe_v"),
}
"""pp -> what runs there, of the schedules that are registered."""
THEORY = {"1f1b": 1.03, "zb_v": 1.05, "dualpipe_v": 1.05}
"""Most time over that of the simulator on stages that overshoot as those of the floor do."""
ZERO_BUBBLE = ("zb_h1", "zb_v", "dualpipe_v")
FASTEST = "zb_v"
"""Which of ours has the goal of real compute: 1F1B's own bubble leaves it hardly any room."""


def run() -> list[Row]:
    rows = [row for pp in RACES for row in sleep_rows(pp, race(pp))]
    return rows + gpt_rows(slowest(run_ranks(2, gpt.race, gpt.MODEL, REPETITIONS)))


def plans(pp: int) -> list[Plan]:
    """The schedules of a race, lowered and proven."""
    made = [
        lower(build_schedule(name, pp, MICROBATCHES, CHUNKS.get(name, 1)))
        for name in RACES[pp]
        if name in SCHEDULES
    ]
    for plan in made:
        validate(plan)
    return made


@dataclass(frozen=True)
class Race:
    """Seconds of a step: ours and torch's by schedule, the floor by a rank's number of chunks."""

    ours: dict[str, Sample]
    peer: dict[str, Sample]
    floor: dict[int, Sample]


def race(pp: int) -> Race:
    found = slowest(run_ranks(pp, _race, plans(pp), real_time=True))

    def of(who: str) -> dict[str, Sample]:
        return {n.partition(" ")[2]: s for n, s in found.items() if n.startswith(f"{who} ")}

    return Race(of("ours"), of("torch"), {int(n): s for n, s in of("floor").items()})


def _race(transport: Transport, raced: list[Plan]) -> dict[str, list[float]]:
    mesh = Mesh.create(MeshShape(pp=transport.world_size), transport)
    contestants: dict[str, Contestant] = {
        f"floor {chunks}": floor(MICROBATCHES, chunks, TIMES) for chunks in (1, 2)
    }
    for plan in raced:
        contestants[f"ours {plan.name}"] = ours(mesh, plan, TIMES)
        if plan.name in PEERS:
            contestants[f"torch {plan.name}"] = torch_step(mesh, plan, TIMES)
    found = time_in_turn(mesh.world, contestants, REPETITIONS)
    contestants.clear()
    mesh.close()
    return found


def theory(plan: Plan) -> float:
    """Seconds of a step on sleeps that do not overshoot, with messages that take no time."""
    each = TIMES.shared(CHUNKS.get(plan.name, 1))
    forward, input_grad, weight_grad = (
        [t] * plan.num_stages for t in (each.forward, each.input_grad, each.weight_grad)
    )
    return simulate(plan, forward, input_grad, weight_grad).makespan


def sleep_rows(pp: int, found: Race) -> list[Row]:
    """A race in milliseconds: each schedule beside theory and torch's, then zero-bubble ones
    beside torch's 1F1B."""
    ideal = MICROBATCHES * (TIMES.forward + TIMES.input_grad + TIMES.weight_grad)
    rows = []
    for plan in plans(pp):
        name = plan.name
        mine, least = found.ours[name].scaled(1e3), found.floor[CHUNKS.get(name, 1)]
        limit = THEORY.get(name)
        due = least.scaled(1e3 * theory(plan) / ideal)
        what = f"{name} pp {pp}, ms"
        goal = Goal("at most", limit) if limit else None
        rows.append(Row(f"{what}: beside theory x floor", mine, due, goal))
        if name in found.peer:
            peer = found.peer[name].scaled(1e3)
            split = name in ZERO_BUBBLE
            against = Goal("at least", 1.03) if split else Goal("at most", 1.02)
            rows.append(Row(f"{what}: beside torch", mine, peer, against, inverse=split))
    one = found.peer["1f1b"].scaled(1e3)
    for name in ZERO_BUBBLE:
        if name in found.ours:
            mine = found.ours[name].scaled(1e3)
            what = f"{name} pp {pp}, ms: beside torch 1f1b"
            rows.append(Row(what, mine, one, Goal("at least", 1.08), inverse=True))
    return rows


def gpt_rows(found: dict[str, Sample]) -> list[Row]:
    """Real compute in tokens/s: pipelines beside one process, and 1F1B beside torch's."""
    rate = {name: sample.rate(gpt.TOKENS) for name, sample in found.items()}
    one, peer = rate["one"], rate["torch 1f1b"]
    rows = [
        Row("GPT two processes, tokens/s: beside one", rate["two"].scaled(2), one),
        Row("GPT torch 1f1b pp 2, tokens/s: beside one process", peer, one),
    ]
    for name in gpt.LAYOUTS:
        if f"ours {name}" in rate:
            what = f"GPT {name} pp 2, tokens/s: beside"
            goal = Goal("at least", 1.62) if name == FASTEST else None
            rows.append(Row(f"{what} one process", rate[f"ours {name}"], one, goal))
            rows.append(Row(f"{what} torch 1f1b", rate[f"ours {name}"], peer))
    return rows
