#!/usr/bin/env bash
# Run a modelcenter command under torchrun on this node. The exit code tells a scheduler what to do next:
#   0   the run finished
#   75  it was stopped by a signal or --max_time: run the same command again to resume
#   other it failed
# Usage: OUTPUT_DIR=runs/a scripts/launch/run.sh finetune classification --model ... (--output_dir is added)
#   NNODES (1), NPROC (GPUs of the node, else 1), RDZV (host:port of the first node), RDZV_ID, MAX_RESTARTS (0)
set -uo pipefail

: "${OUTPUT_DIR:?OUTPUT_DIR is needed: the folder of the run, on storage that all nodes share}"
gpus=$(command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus | wc -l || echo 0)
nproc=${NPROC:-$((gpus > 0 ? gpus : 1))}
if [ "${NNODES:-1}" = 1 ]; then
  meet=(--standalone)
else
  meet=(--nnodes "$NNODES" --rdzv_backend c10d --rdzv_id "${RDZV_ID:-modelcenter}" --rdzv_endpoint "${RDZV:?RDZV is needed: host:port of the first node}")
fi

status() {
  python3 - "$OUTPUT_DIR/summary.json" <<'PY' 2>/dev/null
import json, sys
print(json.load(open(sys.argv[1]))["status"])
PY
}

# The summary of the previous attempt must not be taken for this one's.
[ "$(status)" = stopped ] && [ "${NODE_RANK:-0}" = 0 ] && rm -f "$OUTPUT_DIR/summary.json"

# A signal is passed on to torchrun and by it to the ranks, which save and end. torchrun itself then returns 1.
trap '' USR1 # SLURM may send it to all processes: it would kill torchrun, and the ranks handle it themselves
torchrun "${meet[@]}" --nproc_per_node "$nproc" --max_restarts "${MAX_RESTARTS:-0}" -m modelcenter "$@" --output_dir "$OUTPUT_DIR" &
child=$!
trap 'kill -TERM $child 2>/dev/null' TERM INT USR1
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do
  wait "$child"
  code=$?
done

case "$(status)" in
  finished) exit "$code" ;;
  stopped) exit 75 ;;
  *) exit "$((code ? code : 1))" ;;
esac
