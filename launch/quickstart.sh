#!/usr/bin/env bash
# Trains the embedded corpus with tensor, pipeline and data parallelism at once: 8 processes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run=${RUN_DIR:-runs/quickstart_$(date +%Y%m%d_%H%M%S)}
OMP_NUM_THREADS=1 .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 8 \
  launch/pretrain_gpt.py --config launch/configs/gpt_tiny_cpu.yaml \
  --parallel.tp 2 --parallel.pp 2 \
  --parallel.schedule interleaved_1f1b --parallel.virtual_stages 2 \
  --run.dir "$run" "$@"
.venv/bin/python tools/report.py "$run"
