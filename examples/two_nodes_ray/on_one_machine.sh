#!/usr/bin/env bash
# Train on two Ray nodes that are both on this machine. The run is in runs/.
#
#   examples/two_nodes_ray/on_one_machine.sh CONFIG [KEY=VALUE ...]
set -euo pipefail
if [ $# -lt 1 ]; then
    sed -n '2,4p' "$0"
    exit 64
fi
config=$(realpath "$1")
shift
root=$(realpath "$(dirname "$0")/../..")
exec "$root/tools/ray/two_nodes.sh" ray job submit --working-dir "$(dirname "$config")" -- \
    megarl launch ray "$(basename "$config")" --nodes 2 "run.dir=$PWD/runs" "$@"
