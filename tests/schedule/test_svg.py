from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from megalite.schedule.action import COMPUTE, Plan
from megalite.schedule.costs import Costs
from megalite.schedule.generators import build_schedule
from megalite.schedule.lower import lower
from megalite.schedule.simulate import simulate_step
from megalite.schedule.svg import render_svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn(plan: Plan, costs: Costs) -> ElementTree.Element:
    return ElementTree.fromstring(render_svg(simulate_step(lower(plan), costs), "a < b", "c & d"))


def cells(root: ElementTree.Element) -> dict[str, ElementTree.Element]:
    """The rectangles of actions, by the action's name."""
    found = {}
    for rect in root.iter(f"{SVG}rect"):
        title = rect.findtext(f"{SVG}title")
        if title is not None:
            found[title.split(":")[0]] = rect
    return found


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("zb_v", 2), ("interleaved_1f1b", 3)])
def test_every_computation_is_a_cell_where_and_as_long_as_it_runs(name: str, v: int) -> None:
    plan = build_schedule(name, 3, 4, v)
    costs = Costs.equal(3, v, 1.0, 2.0, 1.5, 0.1)
    timeline = simulate_step(lower(plan), costs)
    root = drawn(plan, costs)
    found = cells(root)
    names = {str(a) for actions in plan.actions for a in actions if a.op in COMPUTE}
    assert set(found) == names
    first, last = float(found["0F0"].attrib["x"]), 0.0
    for rect in found.values():
        last = max(last, float(rect.attrib["x"]) + float(rect.attrib["width"]))
    scale = (last - first) / timeline.makespan
    start = timeline.start[1][timeline.plan[1].index(plan[1][3])]
    assert float(found[str(plan[1][3])].attrib["x"]) == pytest.approx(first + start * scale, abs=1)
    assert len({found[f"{s}F0"].attrib["fill"] for s in (0, 1, 2)}) == 1
    assert len({rect.attrib["fill"] for key, rect in found.items() if "F" in key}) == v


def test_the_number_of_the_microbatch_stands_in_its_cell() -> None:
    root = drawn(build_schedule("zb_h1", 2, 12), Costs.equal(2))
    numbers = [text.text for text in root.iter(f"{SVG}text") if "n" in text.get("class", "")]
    assert numbers.count("11") == 6
    tiny = drawn(build_schedule("1f1b", 2, 2), Costs((1e-9, 1e-9), (500.0,) * 2, (500.0,) * 2))
    texts = [text.text for text in tiny.iter(f"{SVG}text") if text.get("class") in ("n", "n k")]
    assert texts.count("1") == 2  # the two B; the two F are too narrow


def test_reductions_are_strips_only_where_they_take_time() -> None:
    plan = build_schedule("1f1b", 2, 3)
    costs = Costs.equal(2)
    assert "0REDUCE" not in cells(drawn(plan, costs))
    assert "0REDUCE" in cells(drawn(plan, replace(costs, reduce=(1.0, 2.0))))


def test_a_plan_that_takes_no_time_can_be_drawn() -> None:
    drawn(build_schedule("1f1b", 2, 2), Costs.equal(2, 1, 0.0, 0.0, 0.0))
