"""Which rank stands where, and which layers run there."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.mesh_shape import MeshShape
from megalite.report.html import Html, tag
from megalite.schedule.action import Plan

_MOST_RANKS = 1024  # of which each is listed
_MOST_SHOWN = 16  # replicas, and ranks of one


def layout_table(shape: MeshShape, plan: Plan, layers: Sequence[range]) -> Html:
    """A row a pipeline rank with its stages, a column a replica, in a cell the ranks by tp."""
    replicas = _some(shape.dp)
    head = [tag("th", "pp"), tag("th", "stages and layers")]
    head += [tag("th", "…" if dp is None else f"dp {dp}") for dp in replicas]
    rows = []
    for pp in range(shape.pp):
        stages = [_stage(s, layers[s], plan.num_stages) for s in plan.stages_of(pp)]
        cells = [_cell(shape, pp, dp) for dp in replicas]
        rows.append(tag("tr", tag("th", str(pp)), tag("td", *stages), *cells))
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows), class_="layout")
    return tag("div", table, class_="scroll", tabindex=0)


def _stage(stage: int, layers: range, num_stages: int) -> Html:
    first, last = layers.start, layers.stop - 1
    parts = ["embedding"] if stage == 0 else []
    if layers:
        parts.append(f"layer {first}" if first == last else f"layers {first} to {last}")
    parts += ["head and loss"] if stage == num_stages - 1 else []
    return tag("div", tag("b", f"stage {stage}"), f" {', '.join(parts) or 'no layer'}")


def _cell(shape: MeshShape, pp: int, dp: int | None) -> Html:
    if dp is None:
        return tag("td", "…")
    found = []
    for tp in _some(shape.tp):
        if tp is None:
            found.append(Html("…"))
            continue
        rank = shape.rank({"pp": pp, "dp": dp, "tp": tp})
        where = f"rank {rank}: pp {pp}, dp {dp}, tp {tp}"
        found.append(tag("span", str(rank), class_="rank", title=where))
    return tag("td", *found, class_="ranks")


def _some(size: int) -> list[int | None]:
    if size <= _MOST_SHOWN:
        return list(range(size))
    return [*range(_MOST_SHOWN - 2), None, size - 1]


def rank_list(shape: MeshShape) -> Html:
    """Each rank's coordinates, folded; nothing where there are too many ranks."""
    if shape.world_size > _MOST_RANKS:
        return Html("")
    return tag("details", tag("summary", "Rank by rank"), tag("pre", shape.table()))
