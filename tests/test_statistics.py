"""Numbers that stand for a tensor: parts add up, and what others overlook is seen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import megalite.statistics
from megalite.statistics import statistics

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def split(found: Tensor) -> tuple[Tensor, Tensor]:
    return found[:, :4].contiguous().view(torch.float64), found[:, 4]


def drawn(rows: int, b: int, columns: int, dtype: torch.dtype = torch.float64) -> Tensor:
    draw = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randn(rows, b, columns, generator=draw, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numbers_are_what_they_say_for_each_sample(dtype: torch.dtype) -> None:
    x = drawn(6, 3, 8, dtype)
    numbers, _ = split(statistics(x))
    wide = x.double()
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    want = [wide.sum((0, 2)), wide.square().sum((0, 2)), wide.abs().amax((0, 2))]
    torch.testing.assert_close(numbers[:, :3], torch.stack(want, 1), rtol=bound, atol=bound)
    alone, _ = split(statistics(x[:, 1:2]))
    torch.testing.assert_close(alone[0], numbers[1], rtol=bound, atol=bound)


@given(
    st.sampled_from(DTYPES),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_parts_of_any_cut_add_up_to_the_whole(
    dtype: torch.dtype, rows: int, b: int, columns: int, row: int, column: int
) -> None:
    x = drawn(rows, b, columns, dtype)
    row, column = row % rows, column % columns
    numbers, hashed = split(statistics(x))
    total, bits = torch.zeros_like(numbers), torch.zeros_like(hashed)
    for r, up in ((0, x[:row]), (row, x[row:])):
        for c, part in ((0, up[..., :column]), (column, up[..., column:])):
            if part.numel():
                mine, word = split(statistics(part, r, c))
                bits += word
                total[:, 2] = torch.maximum(total[:, 2], mine[:, 2])
                total[:, [0, 1, 3]] += mine[:, [0, 1, 3]]
    assert torch.equal(bits, hashed)
    scale = float(x.double().norm()) + 1e-30
    bound = scale * (1e-12 if dtype == torch.float64 else 1e-5) * max(1.0, scale)
    torch.testing.assert_close(total, numbers, rtol=0, atol=bound)


def test_large_tensors_are_looked_at_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(37, 2, 5)
    numbers, hashed = split(statistics(x))
    monkeypatch.setattr(megalite.statistics, "_CHUNK", 40)
    again, same = split(statistics(x))
    assert torch.equal(hashed, same)
    torch.testing.assert_close(again, numbers, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_hash_sees_any_change_and_the_projection_an_exchange(dtype: torch.dtype) -> None:
    x = drawn(4, 1, 6, dtype)
    numbers, hashed = split(statistics(x))
    changes = {
        "last bit": x.clone().view(torch.int8).flatten().view(dtype).view_as(x),
        "all signs": -x,
        "two signs": torch.cat([-x[:1, :, :2], x[:1, :, 2:]], -1),
        "rows": x.flip(0),
        "columns": x.flip(2),
        "a zero's sign": torch.zeros_like(x).copysign(x),
    }
    raw = changes["last bit"].view(torch.int8)
    raw[0, 0, 0] ^= 1
    changes["two signs"] = torch.cat([changes["two signs"], x[1:]])
    for name, changed in changes.items():
        _, word = split(statistics(changed))
        assert int(word[0]) != int(hashed[0]), name
    for name in ("rows", "columns"):
        got, _ = split(statistics(changes[name]))
        torch.testing.assert_close(got[:, :3], numbers[:, :3])  # the others do not feel it
        assert abs(float(got[0, 3] - numbers[0, 3])) > 0.01, name
    _, zeros = split(statistics(torch.zeros_like(x)))
    assert int(zeros[0]) != int(split(statistics(changes["a zero's sign"]))[1][0])


def test_what_is_no_number_shows() -> None:
    x = drawn(3, 2, 4)
    x[1, 1, 2] = torch.nan
    numbers, _ = split(statistics(x))
    assert numbers[0].isfinite().all() and numbers[1].isnan().any()
