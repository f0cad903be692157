#!/usr/bin/env bash
# Train on several machines with torchrun. Run it on every machine, at about the same time:
#
#   examples/two_nodes_torchrun/run.sh NODE NUM_NODES RANKS_PER_NODE MASTER CONFIG [KEY=VALUE ...]
#
# NODE is 0 on the first machine, 1 on the second, ...; MASTER is the first machine's address, the same everywhere.
# The run directory (run.dir) must be on a disk that all machines share. The same commands go on with a run that stopped.
set -euo pipefail
if [ $# -lt 5 ]; then
    sed -n '2,7p' "$0"
    exit 64
fi
node=$1 num_nodes=$2 ranks_per_node=$3 master=$4 config=$5
shift 5

# --max-restarts=0: on several nodes a lost rank ends all of them, and the same commands go on from the last checkpoint.
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="$num_nodes" --node-rank="$node" --nproc-per-node="$ranks_per_node" \
    --master-addr="$master" --master-port="${MASTER_PORT:-29500}" --max-restarts=0 \
    -m megarl "${MEGARL_COMMAND:-train}" "$config" "run.num_ranks=$((num_nodes * ranks_per_node))" "$@"
