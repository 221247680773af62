#!/usr/bin/env bash
# Run a modelcenter command under torchrun on this node. The exit code tells a scheduler what to do next:
#   0   the run finished
#   75  it was stopped by a signal or --max_time, or the signal came before it could be: run the same command again
#   other it failed
# Usage: OUTPUT_DIR=runs/a scripts/launch/run.sh finetune classification --model ... (--output_dir is added)
#   NNODES (1), NPROC (the GPUs of the node that CUDA_VISIBLE_DEVICES allows, else 1), RDZV (host:port of the first
#   node), RDZV_ID, MAX_RESTARTS (0),
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT (110): seconds for the ranks to save after a signal; less than the scheduler gives
set -uo pipefail

: "${OUTPUT_DIR:?OUTPUT_DIR is needed: the folder of the run, on storage that all nodes share}"
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ') # 0 too where it is there without a GPU or a driver
if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cE '^(GPU|MIG|[0-9])') # "", "-1" and "NoDevFiles" are none
fi
nproc=${NPROC:-$((gpus > 0 ? gpus : 1))}
if [ "${NNODES:-1}" = 1 ]; then
  meet=(--standalone)
else
  meet=(--nnodes "$NNODES" --rdzv_backend c10d --rdzv_id "${RDZV_ID:-modelcenter}" --rdzv_endpoint "${RDZV:?RDZV is needed: host:port of the first node}")
fi

# The status in summary.json, and which file that is.
summary() {
  python3 - "$OUTPUT_DIR/summary.json" <<'PY' 2>/dev/null
import json, os, sys
with open(sys.argv[1]) as file:
    print(json.load(file)["status"], os.fstat(file.fileno()).st_ino, os.fstat(file.fileno()).st_mtime_ns)
PY
}

# The summary of the previous attempt must not be taken for this one's. That of a finished run keeps it from a new one.
# Other nodes may end before the first one has removed it.
found=$(summary)
before=${found%% *}
[ "$before" != finished ] && [ "${NODE_RANK:-0}" = 0 ] && rm -f "$OUTPUT_DIR/summary.json"

# A signal is passed on to torchrun and by it to the ranks, which save and end. torchrun itself then returns 1. Left to
# itself it would kill them 30 seconds later (as torch 2.11 does in any case), too soon for a large checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}"
signalled=
trap '' USR1 # SLURM may send it to all processes: it would kill torchrun, and the ranks handle it themselves
torchrun "${meet[@]}" --nproc_per_node "$nproc" --max_restarts "${MAX_RESTARTS:-0}" -m modelcenter "$@" --output_dir "$OUTPUT_DIR" &
child=$!
trap 'signalled=1; kill -TERM $child 2>/dev/null' TERM INT USR1
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do
  wait "$child"
  code=$?
done

left=$(summary)
after=${left%% *}
[ "$left" = "$found" ] && [ "$before" != finished ] && after=
[ "$after" = stopped ] && exit 75
# While the model was loaded, or the ranks were killed before they had saved.
[ -n "$signalled" ] && [ -z "$after" ] && exit 75
# While the run wrote model/, which it then finished.
[ -n "$signalled" ] && [ "$after" = finished ] && [ "$before" != finished ] && exit 0
[ "$after" = finished ] && exit "$code"
exit "$((code ? code : 1))"
