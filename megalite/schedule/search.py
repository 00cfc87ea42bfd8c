"""The schedule ``auto``: the least makespan that a bounded search finds for given costs."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from megalite.errors import ConfigError
from megalite.schedule.action import Action, Op, Plan
from megalite.schedule.classic import grouped_one_f_one_b
from megalite.schedule.costs import Costs, MemoryLimit
from megalite.schedule.fill import Filled, fill
from megalite.schedule.greedy import greedy_orders, priorities
from megalite.schedule.lower import lower
from megalite.schedule.placement import place_stages
from megalite.schedule.simulate import simulate_step

EFFORT = 3_000_000  # actions timed by a search without a limit of memory
_EVERY = 32  # so many rungs at most are one activation apart
_FINE, _COARSE = 1.2, 2.0  # else: from one to the next, up to twice the memory of 1F1B and above
_KEPT = 8  # plans of a rung that may be simulated with their messages
_THRESHOLDS = (0.5, 0.0, 1.0, 0.75)  # W goes where a rank would wait for this share of its time
_ROUNDINGS = (0.5, 0.999, 0.0, 0.25, 0.75)  # of how many F fit in before the first I

Orders = Sequence[Sequence[Action]]
_Placed = tuple[tuple[int, ...], Orders]  # the rank of each stage, and every rank's order
_Key = tuple[int, int, float]  # makespan, longest span, activations: less is better, in this order


def search(
    pp: int,
    num_microbatches: int,
    virtual_stages: int,
    costs: Costs,
    memory: MemoryLimit,
    named: Iterable[Plan],
) -> Plan:
    """The plan with the least makespan; among equals the one with the shortest span of a rank, to
    1 in 5,000 (what consecutive steps can gain), then with the fewest activations.

    Tried are the named schedules, and orders of F and I whose W are put into the waits: those of
    1F1B with the warm-up that the costs ask for, of list scheduling and of the named schedules;
    then the best one with a longer or shorter warm-up of some ranks, until nothing gets better or
    the effort is spent.

    More memory never makes the plan slower: limits are tried as the rungs of a ladder, from one
    microbatch up to what is allowed, and what is done on a rung does not depend on whether there
    is one above it. Effort is counted in actions, not in seconds, because every rank makes the
    plan for itself and all must find the same one. A million takes one to three seconds.

    The result is never behind a named schedule that keeps the limit: what could be ahead of the
    best one is simulated with its messages.

    Source: rules for warm-up and W in the spirit of Qi et al. 2023 (arXiv:2401.10241), section 3.1.

    Raises:
        ConfigError: if the limit is less than one microbatch.
    """
    if memory.units < 1:
        raise ConfigError(
            "parallel.schedule",
            f"auto is allowed {memory.units:g} microbatches in flight on a rank",
            "Allow at least 1",
        )
    run = _Search(pp, num_microbatches, virtual_stages, costs.near_one(), memory)
    plans = list(named)
    for limit, effort in _ladder(pp, num_microbatches, virtual_stages):
        if limit > memory.units * virtual_stages + 1e-9 or run.is_perfect():
            break
        run.explore(limit, effort, plans)
    return run.best(plans)


def _ladder(pp: int, m: int, v: int) -> list[tuple[int, float]]:
    """Rising limits of a rank's activations, each with the effort that it adds.

    Much goes to the memory of 1F1B, which is what a run is allowed by default, and to its double;
    of the others the lowest gets most: what they find is the start of those above.
    """
    most, usual, double = m * v, pp * v, 2 * pp * v
    rungs, at = {most, *(n for n in (usual, double) if n < most)}, v
    while at < most:
        rungs.add(at)
        ratio = 1.0 if most <= _EVERY else _FINE if at < double else _COARSE
        at = max(at + 1, int(at * ratio))
    shares = {usual: 1 / 4, double: 1 / 8}
    others = sorted(rungs - shares.keys())
    whole = sum(1 / nth for nth in range(1, len(others) + 1))
    shares |= {limit: 5 / 8 / whole / nth for nth, limit in enumerate(others, 1)}
    return [(limit, EFFORT * shares[limit]) for limit in sorted(rungs)]


@dataclass(frozen=True)
class _Candidate:
    """Orders of F and I, and how many I earlier than there each rank is to do its F."""

    rank_of: tuple[int, ...]
    orders: Orders
    leads: tuple[int, ...]
    limit: float
    threshold: float


class _Search:
    def __init__(self, pp: int, m: int, v: int, costs: Costs, memory: MemoryLimit) -> None:
        self.pp, self.m, self.v, self.costs, self.memory = pp, m, v, costs, memory
        self.limit = 0.0  # activations of a rank on the rung that is being explored
        self.rank_ofs = [place_stages("loop", pp, v)]
        if v == 2:
            self.rank_ofs.append(place_stages("v", pp, v))
        self.least_makespan, self.least_span = map(
            min, zip(*(self._bounds(rank_of) for rank_of in self.rank_ofs), strict=True)
        )
        self.effort, self.spent = 0.0, 0
        self.tried = 0
        self.leader: tuple[_Key, _Candidate] | None = None
        self.found: list[tuple[_Key, int, Plan]] = []  # a rung's best; equals in order of arrival
        self.simulated: dict[_Key, list[Plan]] = {}  # by the key without messages
        self.winner: tuple[_Key, Plan] | None = None  # of those, with messages

    def _bounds(self, rank_of: Sequence[int]) -> tuple[float, float]:
        """Of makespan and span: a rank computes for as long as its stages take, after the first F
        has come to it."""
        c, start, makespan, most = self.costs, 0.0, 0.0, 0.0
        for rank in range(self.pp):
            stages = [s for s, r in enumerate(rank_of) if r == rank]
            work = sum(c.forward[s] + c.input_grad[s] + c.weight_grad[s] for s in stages) * self.m
            makespan, most = max(makespan, start + work), max(most, work)
            start += c.forward[rank] + c.comm
        return makespan, most

    def _key(self, makespan: float, span: float, peak: float) -> _Key:
        """Makespans that differ by rounding errors are equal, and so are spans that nearly are."""
        return (
            round(makespan / (self.least_makespan or 1) * 1e9),
            round(span / (self.least_span or 1) * 5000),
            peak,
        )

    def explore(self, limit: float, effort: float, named: Sequence[Plan]) -> None:
        """One rung: what was found below goes on with more memory, beside new orders."""
        self.limit = limit
        self.effort += effort
        self.found = []
        if self.leader is None:
            self._consider(self._one_at_a_time())
        else:
            self._consider(replace(self.leader[1], limit=limit))
        for candidate in self._seeds(named):
            if self._is_over():
                break
            self._consider(candidate)
        while self._climb():
            pass
        self._simulate_found()

    def is_perfect(self) -> bool:
        """Nothing is left to gain."""
        return self.winner is not None and self.winner[0][:2] <= (10**9, 5000)

    def _is_over(self) -> bool:
        """No effort is left, or nothing to gain."""
        done = self.leader is not None and self.leader[0][:2] <= (10**9, 5000)
        return done or self.spent >= self.effort

    def _consider(self, c: _Candidate) -> bool:
        """Whether it is the best one so far."""
        orders = [_led(order, lead) for order, lead in zip(c.orders, c.leads, strict=True)]
        self.tried += 1
        self.spent += self.pp * self.v * self.m * 3
        filled = self._fill(orders, c.rank_of, c.limit, c.threshold)
        if filled is None:
            return False
        key = self._key(filled.makespan, filled.span, filled.peak)
        plan = Plan("auto", self.m, c.rank_of, filled.actions)
        insort(self.found, (key, self.tried, plan))
        del self.found[_KEPT:]
        if self.leader is not None and key >= self.leader[0]:
            return False
        self.leader = key, c
        return True

    def _fill(
        self, orders: Orders, rank_of: Sequence[int], limit: float, threshold: float
    ) -> Filled | None:
        open_w = self.memory.open_w
        return fill(orders, rank_of, self.m, self.costs, limit, open_w, threshold)

    def _climb(self) -> bool:
        """One round of moves from the best candidate; whether it was worth it."""
        better = False
        single = [range(r, r + 1) for r in range(self.pp)]
        first_ones = [range(r + 1) for r in range(1, self.pp)]
        for ranks in (*single, *first_ones):
            for more in (1, -1):
                if self.leader is None or self._is_over():
                    return False
                c = self.leader[1]
                leads = tuple(lead + more * (r in ranks) for r, lead in enumerate(c.leads))
                better |= self._consider(replace(c, leads=leads))
        return better

    def _seeds(self, named: Sequence[Plan]) -> Iterator[_Candidate]:
        """A rank must take messages in the order in which they are sent, or receive buffers pile
        up; neither W nor a warm-up changes that order."""
        kept: list[_Placed] = []
        for threshold in _THRESHOLDS:
            new = threshold == _THRESHOLDS[0]
            for placed in self._affordable(named, kept) if new else kept:
                yield from self._within(placed, threshold)

    def _within(self, placed: _Placed, threshold: float) -> Iterator[_Candidate]:
        """With the warm-up that the limit leaves, alike on all ranks or in stairs."""
        (rank_of, orders), limit = placed, self.limit
        leads = tuple(_lead_within(order, limit) for order in orders)
        yield _Candidate(rank_of, orders, leads, limit, threshold)
        stairs = tuple(min(0, min(leads) + rank) for rank in range(self.pp))
        if stairs != leads:
            yield _Candidate(rank_of, orders, stairs, limit, threshold)

    def _affordable(self, named: Sequence[Plan], kept: list[_Placed]) -> Iterator[_Placed]:
        for found in self._orders(named):
            if _is_first_in_first_out(*found):
                kept.append(found)
                yield found
            self.spent += self.pp * self.v * self.m * 2
            if self.spent >= self.effort:
                return

    def _orders(self, named: Sequence[Plan]) -> Iterator[_Placed]:
        limit, open_w = self.limit, self.memory.open_w
        if self.v == 1:
            for rounding in _ROUNDINGS:
                yield self.rank_ofs[0], self._warmed_up(rounding, limit)
        else:
            for group in dict.fromkeys(max(1, self.pp >> halvings) for halvings in range(4)):
                yield self.rank_ofs[0], self._grouped(group)
        for rank_of in self.rank_ofs:
            for priority in priorities(self.v):
                self.spent += self.pp * self.v * self.m * 4
                yield (
                    rank_of,
                    greedy_orders(rank_of, self.m, self.costs, limit, open_w, priority),
                )
        for plan in named:
            yield plan.rank_of, [_input_grads(actions) for actions in plan.actions]

    def _warmed_up(self, rounding: float, limit: float) -> Orders:
        """1F1B in which a rank does F until the first I can arrive."""
        c, orders, before = self.costs, [], self.m
        for rank in range(self.pp):
            after = range(rank + 1, self.pp)
            wait = sum(c.forward[s] + c.input_grad[s] + 2 * c.comm for s in after)
            each = c.forward[rank]
            fitting = 1 + floor(wait / each + rounding) if wait < self.m * each else self.m
            before = max(1, min(before, fitting, int(min(limit, self.m))))
            order = [Action(Op.FORWARD, rank, m) for m in range(before)]
            for m in range(self.m):
                order.append(Action(Op.INPUT_GRAD, rank, m))
                if m + before < self.m:
                    order.append(Action(Op.FORWARD, rank, m + before))
            orders.append(order)
        return orders

    def _grouped(self, group: int) -> Orders:
        return [
            _input_grads(grouped_one_f_one_b(rank, self.pp, self.m, self.v, group, 1))
            for rank in range(self.pp)
        ]

    def _one_at_a_time(self) -> _Candidate:
        """What any memory suffices for."""
        rank_of = self.rank_ofs[0]
        stages = range(len(rank_of))
        ops = [*((Op.FORWARD, s) for s in stages), *((Op.INPUT_GRAD, s) for s in stages[::-1])]
        orders = [
            [Action(op, s, m) for m in range(self.m) for op, s in ops if rank_of[s] == rank]
            for rank in range(self.pp)
        ]
        return _Candidate(rank_of, orders, (0,) * self.pp, self.limit, 1.0)

    def _simulate_found(self) -> None:
        """The best of a rung, as far as the effort goes; its very best in any case."""
        for nth, (key, _, plan) in enumerate(self.found):
            if nth and self.spent >= self.effort:
                return
            self._simulate(key, plan)

    def _simulate(self, key: _Key, plan: Plan) -> None:
        """Messages and buffers can only delay: a plan is simulated with them unless the winner is
        not behind it even without."""
        same = self.simulated.setdefault(key, [])
        if plan in same or (self.winner is not None and key[:2] >= self.winner[0][:2]):
            return
        same.append(plan)
        self.spent += self.pp * self.v * self.m * 15
        timeline = simulate_step(lower(plan), self.costs)
        exact = self._key(timeline.makespan, timeline.longest_span, key[2])
        if self.winner is None or exact < self.winner[0]:
            self.winner = exact, plan

    def best(self, named: Sequence[Plan]) -> Plan:
        """The winner, or a named schedule that is ahead of it and keeps the limit."""
        ranked: list[tuple[_Key, int, Plan]] = []
        for nth, plan in enumerate(named):
            limit = self.memory.units * self.v
            filled = self._fill(plan.actions, plan.rank_of, limit, 1.0)
            if filled is not None:
                key = self._key(filled.makespan, filled.span, filled.peak)
                ranked.append((key, nth, plan))
        for key, _, plan in sorted(ranked, key=lambda x: x[:2]):
            self._simulate(key, plan)
        assert self.winner is not None, "one microbatch at a time keeps every limit"
        return self.winner[1]


def _input_grads(actions: Sequence[Action]) -> list[Action]:
    """F, and I for every B; without W."""
    return [
        Action(Op.INPUT_GRAD, a.stage, a.microbatch) if a.op is Op.BACKWARD else a
        for a in actions
        if a.op is not Op.WEIGHT_GRAD
    ]


def _lead_within(order: Sequence[Action], limit: float) -> int:
    """0, or how much later F must come so that F less I never exceeds the limit."""
    held = peak = 0
    for a in order:
        held += 1 if a.op is Op.FORWARD else -1
        peak = max(peak, held)
    return -ceil(max(0.0, peak - limit))


def _led(order: Sequence[Action], lead: int) -> Sequence[Action]:
    """The order with each F in the place of the ``lead``-th one before it; the first ones then
    start the list, or the last ones (of a negative lead) alternate with the I that remain."""
    if not lead:
        return order
    forward = [a for a in order if a.op is Op.FORWARD]
    back = [a for a in order if a.op is not Op.FORWARD]
    at = (i for i, a in enumerate(order) if a.op is Op.FORWARD)
    places = [i - nth for nth, i in enumerate(at)]  # the number of I before each F
    if lead > 0:
        places = ([0] * lead + places)[: len(places)]
    else:
        places = places[-lead:] + [places[-1] + nth for nth in range(1, 1 - lead)]
    led: list[Action] = []
    done = 0
    for a, place in zip(forward, places, strict=False):
        led += back[done : max(done, place)]
        done = max(done, place)
        led.append(a)
    return led + back[done:]


def _is_first_in_first_out(rank_of: Sequence[int], orders: Orders) -> bool:
    """Whether each channel's messages are taken in the order in which they are made."""
    made: defaultdict[tuple[int, int, Op], list[tuple[int, int]]] = defaultdict(list)
    taken: defaultdict[tuple[int, int, Op], list[tuple[int, int]]] = defaultdict(list)
    for rank, order in enumerate(orders):
        for a in order:
            way = 1 if a.op is Op.FORWARD else -1
            to, source = a.stage + way, a.stage - way
            if 0 <= to < len(rank_of):
                made[rank, rank_of[to], a.op].append((to, a.microbatch))
            if 0 <= source < len(rank_of):
                taken[rank_of[source], rank, a.op].append((a.stage, a.microbatch))
    return all(made[channel] == taken[channel] for channel in made if channel[0] != channel[1])
