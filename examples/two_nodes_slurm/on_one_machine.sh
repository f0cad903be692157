#!/usr/bin/env bash
# Train on two Slurm nodes that are both on this machine, and show the job's log, which is kept in runs/job.log. The run
# is where the configuration says.
#
#   examples/two_nodes_slurm/on_one_machine.sh CONFIG [KEY=VALUE ...]
set -euo pipefail
if [ $# -lt 1 ]; then
    sed -n '2,5p' "$0"
    exit 64
fi
mkdir -p runs
rm -f runs/job.log # the job would append to it
export SBATCH_OUTPUT=runs/job.log
tools=$(dirname "$0")/../../tools/slurm
exec "$tools/two_nodes.sh" bash -euo pipefail -c '
    job=$(megarl launch slurm "$1" --nodes 2 --submit "${@:2}")
    job=${job##* }
    told() { scontrol show job -o "$job" | sed -n "s/.* $1=\([^ ]*\).*/\1/p"; }
    tail -n +1 -F "$(told StdOut)" 2>/dev/null &
    until case $(told JobState) in PENDING | RUNNING | COMPLETING) false ;; esac; do sleep 0.5; done
    sleep 1.5 # for the last lines
    echo "job $job: $(told JobState), exit code $(told ExitCode)"
    [ "$(told JobState)" = COMPLETED ]
' bash "$@"
