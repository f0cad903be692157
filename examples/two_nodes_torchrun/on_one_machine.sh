#!/usr/bin/env bash
# run.sh on two machines that are network namespaces of this one, joined by a virtual cable. Needs root and iproute2.
# What the second machine says is in runs/node_1.log.
#
#   examples/two_nodes_torchrun/on_one_machine.sh CONFIG [KEY=VALUE ...]
set -euo pipefail
here=$(dirname "$0")
a=megarl-$$-a b=megarl-$$-b
cleanup() {
    ip netns del "$a" 2>/dev/null || true
    ip netns del "$b" 2>/dev/null || true
}
trap cleanup EXIT
ip netns add "$a"
ip netns add "$b"
ip link add va$$ netns "$a" type veth peer name vb$$ netns "$b"
ip -n "$a" addr add 10.77.0.1/24 dev va$$
ip -n "$b" addr add 10.77.0.2/24 dev vb$$
ip -n "$a" link set lo up
ip -n "$b" link set lo up
ip -n "$a" link set va$$ up
ip -n "$b" link set vb$$ up

mkdir -p runs
ip netns exec "$b" "$here/run.sh" 1 2 1 10.77.0.1 "$@" >runs/node_1.log 2>&1 &
second=$!
code=0
ip netns exec "$a" "$here/run.sh" 0 2 1 10.77.0.1 "$@" || code=$?
wait "$second" || code=$?
exit "$code"
