"""The few fitted constants, and what is known of software stacks; from YAML, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from typing import Any

from megalite.errors import ConfigError
from megalite.planner.hardware import FOLDER, read_yaml

CONSTANTS, STACKS = FOLDER / "_constants.yaml", FOLDER / "_stacks.yaml"


@dataclass(frozen=True)
class Constants:
    """What data sheets do not say. Each has its bounds and its meaning in ``_constants.yaml``.

    Attributes:
        sustained: of the best rate of a matrix product, what a long run keeps (clocks, power).
        ramp_k: added to k, as if each tile had to compute so much more: filling the pipeline
            and writing the result.
        stream: of the bandwidth that copies reach, what element-wise kernels and norms reach.
        gap: seconds of each kernel in which the device starts and ends.
        loss: passes over the logits, relative to those of a loss that is computed in place.
        flash: of the rate of matrix products, what a fused attention reaches.
        launch_forward, launch_backward: the host's time for a kernel, relative to the hardware's.
        sync: seconds that a tp collective waits for the last of its ranks, for each doubling.
    """

    sustained: float
    ramp_k: float
    stream: float
    gap: float
    loss: float
    flash: float
    launch_forward: float
    launch_backward: float
    sync: float


@dataclass(frozen=True)
class Framework:
    """What a software stack does, as its source code or paper says.

    Attributes:
        grad_bytes: of an element of a gradient sum.
        reduce_bytes: of an element of a gradient when it is reduced over dp.
        fused_sum: the weight product adds to the sum by itself.
        overlap_dp: gradients are reduced while the last backward goes on.
        overlap_tp: the input gradient's all-reduce hides behind the weight product.
        overlap_gather: under ZeRO-1, weights are gathered while the next forward goes on.
        blocking_p2p: a rank computes nothing while it hands over.
        scatter_p2p: each tp rank sends a part of the message, and the receivers gather.
        dropout: masks of attention and residuals in training.
        update_bytes: moved for each parameter in the update: norm, Adam in fp32, and the weight's
            copy; more where scaling, clipping and copies are kernels of their own.
        zero_bytes: moved for each parameter and microbatch because of ZeRO-1.
        vocab_multiple: the vocabulary is padded to a multiple of this x tp.
        in_place: the loss turns its exponentials into the gradient, and has nothing besides but
            the logits, else two more copies in fp32; tp collectives need no buffers of their own;
            messages have those of each stage, not of each rank.
        reserve: allocated bytes x this = what the measuring tool shows.
    """

    name: str = ""
    grad_bytes: int = 4
    reduce_bytes: int = 4
    fused_sum: bool = True
    overlap_dp: bool = True
    overlap_tp: bool = True
    overlap_gather: bool = False
    blocking_p2p: bool = False
    scatter_p2p: bool = False
    dropout: bool = False
    zero_bytes: float = 0.0
    update_bytes: float = 38.0
    vocab_multiple: int = 1
    in_place: bool = False
    reserve: float = 1.0


MEGALITE = Framework("megalite", overlap_gather=True, in_place=True)


@dataclass(frozen=True)
class Stacks:
    """Frameworks by name, clusters' network bandwidth by name, and a scalar a pair."""

    frameworks: Mapping[str, Framework] = field(default_factory=dict)
    net_bytes_s: Mapping[str, float] = field(default_factory=dict)
    scalars: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def framework(self, name: str) -> Framework:
        """A known one; an unknown one behaves like megalite."""
        return self.frameworks.get(name, MEGALITE)

    def known(self, name: str) -> Framework:
        """A known one, or megalite.

        Raises:
            ConfigError: for any other name, with those that are known.
        """
        if name != MEGALITE.name and name not in self.frameworks:
            names = [MEGALITE.name, *self.frameworks]
            near = get_close_matches(name, names, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ConfigError(
                "--framework", f"there is no framework {name!r}", f"{hint}Use one of "
                + ", ".join(names),
            )  # fmt: skip
        return self.framework(name)

    def network(self, name: str) -> float:
        """Bytes a second of a known cluster's network.

        Raises:
            ConfigError: for any other name, with those that are known.
        """
        if name not in self.net_bytes_s:
            raise ConfigError(
                "--cluster", f"there is no cluster {name!r}",
                f"Use one of {', '.join(self.net_bytes_s)}, or leave it out",
            )  # fmt: skip
        return self.net_bytes_s[name]

    def scalar(self, framework: str, cluster: str) -> float:
        """How much slower than predicted; unknown = 1.0."""
        return self.scalars.get((framework, cluster), 1.0)


@cache
def load_constants() -> Constants:
    found = read_yaml(CONSTANTS)
    values = {}
    for f in fields(Constants):
        entry = found[f.name]
        low, value, high = entry["low"], entry["value"], entry["high"]
        if not low <= value <= high:
            raise ConfigError(f"{CONSTANTS.name}: {f.name}", f"{value} is not {low} to {high}", "")
        values[f.name] = float(value)
    return Constants(**values)


@cache
def load_stacks() -> Stacks:
    found = read_yaml(STACKS)
    frameworks = {
        name: Framework(name, **{k: v for k, v in entry.items() if k != "source"})
        for name, entry in found["frameworks"].items()
    }
    clusters = {name: float(entry["net_bytes_s"]) for name, entry in found["clusters"].items()}
    scalars = {(e["framework"], e["cluster"]): float(e["value"]) for e in found["scalars"]}
    return Stacks(frameworks, clusters, scalars)


def bounds() -> dict[str, tuple[float, float, float]]:
    """Of each constant: low, value, high."""
    found: dict[str, Any] = read_yaml(CONSTANTS)
    return {name: (e["low"], e["value"], e["high"]) for name, e in found.items()}
