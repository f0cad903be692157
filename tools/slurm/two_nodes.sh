#!/usr/bin/env bash
# Two Slurm nodes on this machine, in namespaces of their own. Runs COMMAND among them; when it ends, or this script is
# killed, nothing of the cluster is left. Needs root, iproute2, munge and Slurm (make setup-launchers).
#
#   tools/slurm/two_nodes.sh COMMAND [WORD ...]
#   tools/slurm/two_nodes.sh sinfo
set -euo pipefail
if [ $# -eq 0 ]; then
    sed -n '2,6p' "$0"
    exit 64
fi
PATH=$PATH:/usr/sbin:/sbin
if [ "$1" != --inside ]; then
    root=$(mktemp -d /tmp/megarl-slurm-XXXXXX)
    trap 'rm -rf "$root"' EXIT
    code=0
    unshare --net --pid --mount --fork --kill-child --mount-proc "$0" --inside "$root" "$@" || code=$?
    exit "$code"
fi
root=$2
shift 2

# Slurm looks for addresses that are not loopback, and the nodes need names: both exist in here only.
ip link set lo up
ip addr add 10.78.0.1/32 dev lo
ip addr add 10.78.0.2/32 dev lo
printf '127.0.0.1 localhost\n10.78.0.1 n1\n10.78.0.2 n2\n' >"$root/hosts"
mount --bind "$root/hosts" /etc/hosts
mkdir -p "$root/state" "$root/spool/n1" "$root/spool/n2"

# Jobs and messages carry credentials of munge, as on any cluster, with a key of this one. --force: its files are in /tmp.
mkdir -m 700 "$root/munge"
(umask 077 && head -c 128 /dev/urandom >"$root/munge/key")
munged --force --origin=10.78.0.1 --socket="$root/munge/socket" --key-file="$root/munge/key" \
    --seed-file="$root/munge/seed" --log-file="$root/munge/log" --pid-file="$root/munge/pid"

# cred_expire decides how long a requeued job waits; 5 seconds is the least.
cat >"$root/slurm.conf" <<END
ClusterName=megarl
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$root/munge/socket,cred_expire=5
SlurmctldPort=16817
StateSaveLocation=$root/state
SlurmdSpoolDir=$root/spool/%n
SlurmctldPidFile=$root/slurmctld.pid
SlurmdPidFile=$root/slurmd-%n.pid
SlurmctldLogFile=$root/slurmctld.log
SlurmdLogFile=$root/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
KillWait=5
MailProg=/bin/true
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=localhost NodeAddr=10.78.0.1 Port=16901 CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=10.78.0.2 Port=16902 CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
END
export SLURM_CONF=$root/slurm.conf
slurmctld -c -D >"$root/slurmctld.out" 2>&1 &
slurmd -D -N n1 >"$root/slurmd-n1.out" 2>&1 &
slurmd -D -N n2 >"$root/slurmd-n2.out" 2>&1 &
tries=0
until [ "$(sinfo -N -h -o '%N %T' 2>/dev/null | grep -c ' idle$')" = 2 ]; do
    tries=$((tries + 1))
    if [ "$tries" -gt 600 ]; then
        tail -n 20 "$root"/*.log >&2
        exit 69
    fi
    sleep 0.1
done
"$@"
