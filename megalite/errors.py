"""The errors a user can meet; each names the place, the problem with its numbers and a way out."""

from __future__ import annotations


class ConfigError(Exception):
    """A setting that cannot work, found before anything starts.

    Args:
        field: dotted name of the setting, as in flags and YAML (``parallel.tp``).
        problem: what is wrong, with the values.
        fix: what would work instead.
    """

    def __init__(self, field: str, problem: str, fix: str) -> None:
        super().__init__(field, problem, fix)
        self.field, self.problem, self.fix = field, problem, fix

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}. {self.fix}"


class ScheduleError(Exception):
    """A pipeline schedule that is not executable; the message carries its grid."""


class CheckpointError(Exception):
    """A checkpoint that cannot be trusted or does not fit; names the file."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(str(path), problem)
        self.path, self.problem = str(path), problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"
