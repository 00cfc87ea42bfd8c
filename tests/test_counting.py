from __future__ import annotations

import torch

from megalite.mesh import Transport
from tests.counting import CountingTransport, Record
from tests.ranks import run_ranks


def use_every_operation(transport: Transport) -> tuple[list[Record], list[int], int]:
    counting = CountingTransport(transport)
    both, other = counting.new_group([0, 1]), counting.new_group([0, 1])
    assert both is not None and other is not None
    x, big = torch.ones(2, 3), torch.ones(4, 3)
    both.all_reduce(x).wait()
    both.all_gather(big, x).wait()
    both.reduce_scatter(x, big).wait()
    both.broadcast(x.long(), 1).wait()
    message = x.to(torch.bfloat16)
    (other.send(message, 1) if counting.rank == 0 else other.recv(message, 0)).wait()
    counts = [counting.count(), counting.count("send"), counting.num_bytes("all_gather", [0, 1])]
    records = list(counting.records)
    counting.reset()
    counting.close_group(both)
    counting.close_group(other)
    return records, counts, counting.count()


def test_each_operation_is_recorded_with_its_group_shape_and_bytes() -> None:
    f32, i64, bf16 = torch.float32, torch.int64, torch.bfloat16
    for rank, (records, counts, after_reset) in enumerate(run_ranks(2, use_every_operation)):
        assert records == [
            Record("all_reduce", 0, (0, 1), (2, 3), f32, 24),
            Record("all_gather", 0, (0, 1), (2, 3), f32, 24),
            Record("reduce_scatter", 0, (0, 1), (4, 3), f32, 48),
            Record("broadcast", 0, (0, 1), (2, 3), i64, 48, peer=1),
            Record(["send", "recv"][rank], 1, (0, 1), (2, 3), bf16, 12, peer=1 - rank),
        ]
        assert counts == [5, 1 - rank, 24] and after_reset == 0
