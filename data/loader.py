"""Batches for one data-parallel rank: which rows of the global batch it reads, and when.

Row i of a global batch belongs to microbatch ``i // (mbs * dp)`` and to dp rank
``(i // mbs) % dp``. Rows that a global batch lacks are rows of ignored targets.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.dataset import Mixture, TokenDataset
from data.order import Ints
from megalite.tensor_parallel.cross_entropy import IGNORE

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class BatchShape:
    """How a global batch is cut; ``dp_index`` is this rank's place among ``dp_size``."""

    seq_length: int
    global_batch_size: int
    micro_batch_size: int
    dp_index: int = 0
    dp_size: int = 1

    @property
    def num_microbatches(self) -> int:
        return -(-self.global_batch_size // (self.micro_batch_size * self.dp_size))

    def rows(self) -> Ints:
        """(m, mbs) the rows of the global batch that this rank reads; -1 for a missing one."""
        per_microbatch = self.micro_batch_size * self.dp_size
        first = per_microbatch * np.arange(self.num_microbatches)
        inside = self.dp_index * self.micro_batch_size + np.arange(self.micro_batch_size)
        rows = first[:, None] + inside
        return np.where(rows < self.global_batch_size, rows, -1)

    def blank(self) -> tuple[Ints, Ints]:
        """(m * mbs, s) inputs of 0 and targets that are all ignored."""
        shape = (self.num_microbatches * self.micro_batch_size, self.seq_length)
        return np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)

    def batch(self, inputs: Ints, targets: Ints) -> Batch:
        shape = (self.num_microbatches, self.micro_batch_size, self.seq_length)
        return torch.from_numpy(inputs).view(shape), torch.from_numpy(targets).view(shape)


class TokenLoader:
    """The training batches of one dp rank: step k reads samples k * gbs .. (k + 1) * gbs - 1.

    A thread prepares the step after the one that was asked for last, and no other; any step may
    be asked for at any time. Close the loader, or use it in a ``with``.
    """

    def __init__(
        self,
        data: TokenDataset | Mixture,
        *,
        seq_length: int,
        global_batch_size: int,
        micro_batch_size: int,
        dp_index: int = 0,
        dp_size: int = 1,
        seed: int = 0,
    ) -> None:
        """Raises:
        ConfigError: if a data set has not one sample of ``seq_length`` + 1 tokens.
        """
        self.data = data if isinstance(data, Mixture) else Mixture([data])
        self.data.check(seq_length)
        self.shape = BatchShape(seq_length, global_batch_size, micro_batch_size, dp_index, dp_size)
        self.seed = seed
        self._rows = self.shape.rows().reshape(-1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._next: tuple[int, Future[Batch]] | None = None

    def sample_ids(self, step: int) -> Ints:
        """(m, mbs) global sample numbers of a step; -1 for a missing row."""
        rows = self.shape.rows()
        return np.where(rows < 0, -1, step * self.shape.global_batch_size + rows)

    def batch(self, step: int) -> Batch:
        """(inputs, targets) of a step, int64, (m, mbs, s) each; targets are the next tokens.

        Raises:
            Whatever reading the step raised, here in the caller.
        """
        ahead, self._next = self._next, None
        if ahead and ahead[0] == step:
            batch = ahead[1].result()
        else:
            batch = self._thread.submit(self._read, step).result()
        self._next = (step + 1, self._thread.submit(self._read, step + 1))
        return batch

    def close(self) -> None:
        """End the thread; waits for the step that it is reading."""
        self._next = None
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> TokenLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, step: int) -> Batch:
        inputs, targets = self.shape.blank()
        here = self._rows >= 0
        g = step * self.shape.global_batch_size + self._rows[here]
        tokens = self.data.samples(g, self.shape.seq_length, self.seed)
        inputs[here], targets[here] = tokens[:, :-1], tokens[:, 1:]
        return self.shape.batch(inputs, targets)


class EvalLoader:
    """Held-out windows in a fixed order: over all batches, each token is a target exactly once.

    Windows do not overlap; the very first token is predicted from a document border, and the
    last window is filled up with ignored targets.

    Attributes:
        num_batches: at most ``max_batches``, if that is above 0.
        num_tokens: targets in these batches, over all dp ranks.
        utf8_bytes: bytes of text behind them, for bits per byte. Of a part of the split it is
            the split's bytes in proportion to tokens, for bytes are counted by split.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        seq_length: int,
        global_batch_size: int,
        micro_batch_size: int,
        dp_index: int = 0,
        dp_size: int = 1,
        max_batches: int = 0,
    ) -> None:
        self.dataset = dataset
        self.shape = BatchShape(seq_length, global_batch_size, micro_batch_size, dp_index, dp_size)
        self._rows = self.shape.rows().reshape(-1)
        per_batch = global_batch_size * seq_length
        total = -(-dataset.num_tokens // per_batch)
        self.num_batches = min(total, max_batches) if max_batches > 0 else total
        self.num_tokens = min(dataset.num_tokens, self.num_batches * per_batch)
        self.utf8_bytes = round(dataset.utf8_bytes * self.num_tokens / dataset.num_tokens)

    def batch(self, i: int) -> Batch:
        """(inputs, targets) of batch i, int64, (m, mbs, s) each."""
        if not 0 <= i < self.num_batches:
            raise IndexError(f"batch {i} of {self.num_batches}")
        inputs, targets = self.shape.blank()
        for at, row in enumerate(self._rows):
            start = (i * self.shape.global_batch_size + int(row)) * self.shape.seq_length
            if row >= 0 and start < self.dataset.num_tokens:
                self._fill(inputs[at], targets[at], start)
        return self.shape.batch(inputs, targets)

    def _fill(self, inputs: Ints, targets: Ints, start: int) -> None:
        stop = min(start + self.shape.seq_length, self.dataset.num_tokens)
        tokens = self.dataset.tokens(max(0, start - 1), stop)
        if start == 0:
            tokens = np.concatenate([[self.dataset.manifest.eod], tokens])
        inputs[: stop - start], targets[: stop - start] = tokens[:-1], tokens[1:]
