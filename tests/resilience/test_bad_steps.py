from __future__ import annotations

from math import inf, nan

import pytest

from megalite.optim.clip import Told
from megalite.resilience.bad_steps import MOST_IN_A_ROW, BadSteps, Where

GOOD = Told(2.0, 10.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0)
BAD_LOSS = GOOD._replace(loss=nan, grad_norm=nan, finite=0.0, bad_losses=1.0)
BAD_GRADS = GOOD._replace(grad_norm=inf, finite=0.0)


def test_nothing_is_said_of_good_steps() -> None:
    judge = BadSteps("stop", scaled=False)
    assert [judge.judge(n, GOOD) for n in range(100)] == [None] * 100


def test_stop_ends_the_run_at_the_first_bad_step() -> None:
    for bad in (BAD_LOSS, BAD_GRADS):
        found = BadSteps("stop", scaled=False).judge(3, bad)
        assert found and found.ends and found.where is Where.STEP and "step 3: loss" in found.text


def test_skip_goes_on_until_too_many_come_in_a_row() -> None:
    judge = BadSteps("skip", scaled=False)
    for n in range(3 * MOST_IN_A_ROW):
        found = judge.judge(n, BAD_LOSS if n % 2 else GOOD)
        assert found is None if n % 2 == 0 else (found and not found.ends)
    judge.judge(0, GOOD)
    ends = [(f := judge.judge(n, BAD_GRADS)) is not None and f.ends for n in range(MOST_IN_A_ROW)]
    assert ends == [False] * (MOST_IN_A_ROW - 1) + [True]


def test_replay_tells_a_transient_fault_from_one_that_comes_again() -> None:
    judge = BadSteps("replay", scaled=False)
    found = judge.judge(4, GOOD, replays=1)
    assert found and found.event == "transient" and not found.ends and found.where is Where.KEPT
    found = judge.judge(5, BAD_LOSS, replays=1)
    assert found and found.ends and found.text.endswith("and neither when computed again")


def test_an_overflow_of_scaled_gradients_is_no_bad_step_but_a_bad_loss_is() -> None:
    judge = BadSteps("stop", scaled=True)
    found = judge.judge(1, BAD_GRADS._replace(scale=1024.0))
    assert found and not found.ends and "the loss scale is now 512" in found.text
    found = judge.judge(2, BAD_LOSS._replace(scale=1024.0))
    assert found and found.ends
    found = judge.judge(3, BAD_GRADS._replace(scale=2.0**-10))
    assert found and found.ends and "overflow at a loss scale" in found.text


@pytest.mark.parametrize("what", ["loss", "norm"])
def test_a_spike_is_flagged_and_does_not_become_what_is_usual(what: str) -> None:
    judge = BadSteps("stop", scaled=False)
    for n in range(40):
        assert (
            judge.judge(n, GOOD._replace(loss=3.0 - 0.01 * n, grad_norm=1 + 0.2 * (n % 3))) is None
        )
    spike = GOOD._replace(loss=4.0) if what == "loss" else GOOD._replace(loss=2.6, grad_norm=30.0)
    for n in range(40, 44):
        found = judge.judge(n, spike)
        assert found and found.event == "spike" and not found.ends, n
    assert judge.judge(44, GOOD._replace(loss=2.6)) is None


def test_the_first_steps_are_no_spikes() -> None:
    judge = BadSteps("stop", scaled=False)
    assert all(judge.judge(n, GOOD._replace(loss=10.0 / (n + 1))) is None for n in range(12))
