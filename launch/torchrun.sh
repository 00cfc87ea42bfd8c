#!/usr/bin/env bash
# Trains through launch/elastic.py, on this node or as one node of several:
#
#   bash launch/torchrun.sh --config FILE [--section.field value ...]
#
# NPROC        processes of this node; else one a GPU, else 1
# NNODES       how many nodes run this script, or MIN:MAX to go on while nodes leave and return;
#              else 1. With more than one, also:
# NODE_RANK    0 .. NNODES-1, each on one node
# MASTER_ADDR  the name or address of node 0, as the others know it
# MASTER_PORT  a free port of node 0
set -euo pipefail

fail() {
  printf 'torchrun.sh: %s\n' "$*" >&2
  exit 2
}

# As CUDA sees them: all, or those that the variable lists before a -1.
count_gpus() {
  local -a ids=()
  local id count=0
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    IFS=, read -r -a ids <<< "$CUDA_VISIBLE_DEVICES"
    for id in "${ids[@]}"; do
      [[ $id != -1 ]] || break
      count=$((count + 1))
    done
    echo "$count"
  elif command -v nvidia-smi > /dev/null; then
    nvidia-smi -L 2> /dev/null | grep -c '^GPU ' || true
  else
    echo 0
  fi
}

count() {
  [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1 is '$2': give a number from 1"
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
[[ -x $python ]] || python=$(command -v python3) || fail "no Python: make setup, in $root"

gpus=$(count_gpus)
nproc=${NPROC:-$((gpus > 0 ? gpus : 1))}
nnodes=${NNODES:-1}
count NPROC "$nproc"
count NNODES "${nnodes%:*}"
count NNODES "${nnodes#*:}"
most=${nnodes#*:}
((${nnodes%:*} <= most)) || fail "NNODES is '$nnodes': the first number is the smaller one"

tasks=${SLURM_STEP_NUM_TASKS:-1}
hosts=${SLURM_STEP_NUM_NODES:-1}
if ((tasks > hosts)); then
  fail "srun started $tasks tasks on $hosts node(s), and each would start $nproc processes." \
    "One launcher is enough: srun --ntasks-per-node=1"
fi
if ((hosts > most)); then
  fail "srun runs this on $hosts nodes but NNODES is $nnodes: each would train by itself." \
    "Use launch/slurm.sbatch, or set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT"
fi

if ((most == 1)); then
  args=(--standalone)
else
  for name in NODE_RANK MASTER_ADDR MASTER_PORT; do
    [[ -n ${!name:-} ]] || fail "NNODES is $nnodes, but $name is not set: give it on every node"
  done
  if ! [[ $NODE_RANK =~ ^[0-9]+$ ]] || ((NODE_RANK >= most)); then
    fail "NODE_RANK is '$NODE_RANK': with NNODES=$nnodes it is one of 0 to $((most - 1))"
  fi
  count MASTER_PORT "$MASTER_PORT"
  if command -v getent > /dev/null && ! getent ahosts "$MASTER_ADDR" > /dev/null; then
    fail "MASTER_ADDR is $MASTER_ADDR, which this node cannot find"
  fi
  if ((NODE_RANK == 0)) && (: < "/dev/tcp/127.0.0.1/$MASTER_PORT") 2> /dev/null; then
    fail "port $MASTER_PORT of this node is taken: set MASTER_PORT to a free one on every node"
  fi
  args=(--nnodes "$nnodes" --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --rdzv-conf timeout=300)
fi

# Many processes share the cores of a node without GPUs; more threads than cores crawl.
((gpus > 0)) || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

exec "$python" "$root/launch/elastic.py" "${args[@]}" --nproc-per-node "$nproc" \
  "$root/launch/pretrain_gpt.py" "$@"
