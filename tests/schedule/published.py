"""Figures of Qi et al. 2023 (arXiv:2401.10241): profiled times, and the bubble rates of table 5."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.schedule.costs import Costs


@dataclass(frozen=True)
class Profiled:
    """A model on ``pp`` ranks; F, I, W and a message in milliseconds, bubble rates by span.

    ``chunks`` is the number of virtual stages with which it was run interleaved.
    """

    model: str
    pp: int
    num_microbatches: int
    times: tuple[float, float, float, float]
    chunks: int
    one_f_one_b: float
    interleaved: float
    zb_h1: float
    zb_h2: float
    zb_1p: float
    zb_2p: float

    def costs(self, virtual_stages: int = 1) -> Costs:
        return Costs.equal(self.pp, virtual_stages, *self.times)

    def __str__(self) -> str:
        return f"{self.model}-{self.num_microbatches}"


PROFILED = [
    Profiled("1.5B", 8, 24, (18.522, 18.086, 9.337, 0.601), 3,
             0.2431, 0.1055, 0.1585, 0.1083, 0.1585, 0.0433),
    Profiled("1.5B", 8, 32, (18.513, 18.086, 9.331, 0.626), 3,
             0.1985, 0.0818, 0.1242, 0.0837, 0.1242, 0.0039),
    Profiled("1.5B", 8, 64, (18.546, 18.097, 9.321, 0.762), 3,
             0.1240, 0.0443, 0.0674, 0.0444, 0.0674, 0.0026),
    Profiled("6.2B", 8, 24, (29.718, 29.444, 19.927, 0.527), 4,
             0.2347, 0.0808, 0.1323, 0.0698, 0.1323, 0.0029),
    Profiled("14.6B", 16, 48, (11.347, 11.248, 8.132, 0.377), 3,
             0.2552, 0.1104, 0.1397, 0.0672, 0.1397, 0.0066),
    Profiled("28.3B", 32, 96, (10.419, 10.207, 7.715, 0.408), 2,
             0.2646, 0.1493, 0.1421, 0.0641, 0.1421, 0.0038),
]  # fmt: skip
