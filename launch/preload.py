"""What the forkserver of ``launch/elastic.py`` imports once for all workers."""

from __future__ import annotations

import torch._dynamo  # else imported by the first optimizer of every worker
import torch.distributed.elastic.multiprocessing
import torch.multiprocessing  # noqa: F401

import launch.pretrain_gpt  # noqa: F401
