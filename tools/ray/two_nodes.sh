#!/usr/bin/env bash
# Two Ray nodes on this machine, in a network of their own, that ask for a token. Runs COMMAND among them; when it ends,
# or this script is killed, nothing of the cluster is left. Needs iproute2 and the right to make namespaces.
#
#   tools/ray/two_nodes.sh COMMAND [WORD ...]
#   CPUS=2 tools/ray/two_nodes.sh ray status        # two cores per node; one if not given
set -euo pipefail
if [ $# -eq 0 ]; then
    sed -n '2,6p' "$0"
    exit 64
fi
if [ -z "${MEGARL_RAY_SCRATCH:-}" ]; then
    MEGARL_RAY_SCRATCH=$(mktemp -d /tmp/megarl-ray-XXXXXX) # short: Ray makes sockets below it
    export MEGARL_RAY_SCRATCH
    trap 'rm -rf "$MEGARL_RAY_SCRATCH"' EXIT
    root=()
    [ "$(id -u)" = 0 ] || root=(--map-root-user)
    code=0
    unshare "${root[@]}" --net --pid --fork --kill-child --mount-proc "$0" "$@" || code=$?
    exit "$code"
fi

ip link set lo up
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$MEGARL_RAY_SCRATCH/token
(umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' >"$RAY_AUTH_TOKEN_PATH")
export RAY_TMPDIR=$MEGARL_RAY_SCRATCH RAY_ADDRESS=127.0.0.1:6379
export RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 RAY_USAGE_STATS_ENABLED=0
# `ray job stop` kills after 3 seconds if it is not told otherwise: too early for a step and a checkpoint.
export RAY_JOB_STOP_WAIT_TIME_S=${RAY_JOB_STOP_WAIT_TIME_S:-600}
common=(--num-cpus="${CPUS:-1}" --object-store-memory=80000000 --disable-usage-stats)
{
    ray start --head --node-ip-address=127.0.0.1 --port=6379 --dashboard-host=127.0.0.1 --dashboard-port=8265 \
        "${common[@]}"
    ray start --address=127.0.0.1:6379 "${common[@]}"
} >"$MEGARL_RAY_SCRATCH/start.log" 2>&1 || { cat "$MEGARL_RAY_SCRATCH/start.log" >&2; exit 69; }
"$@"
