#!/bin/sh
# The settings of t-vits side by side on one GPU, 24 epochs, each for a limited time:
#
#     sh experiments/vits.sh CODED_OR_PLAIN_CIFAR10.npz RESULTS [SECONDS] [SIZE] [SEEDS]
#
# CODED: cifar10.npz of the shared data, with load_data.py beside it; or plain arrays. RESULTS gets one
# results.json and one log per setting; cells stay in $CELLS (default /tmp/vits), and a second run
# continues there. SIZE smoke runs on a CPU in a minute (SEEDS 2).
set -eu
data=$1 results=$2 seconds=${3:-300} size=${4:-published} seeds=${5:-2}
cells=${CELLS:-/tmp/vits} python=${PYTHON:-python}
mkdir -p "$cells/data" "$results"
if [ "$size" = published ] && [ ! -f "$cells/data/cifar10.npz" ]; then
    $python "$(dirname "$data")/load_data.py" "$data" "$cells/data/cifar10.npz"
fi
export PYTHONPATH="${PYTHONPATH:-src}" OMP_NUM_THREADS=2
# Which of the columns each process computes, by a word of their names
for setting in "dropout, best kept" "Adam with L2" "ours"; do
    name=$(echo "$setting" | tr -dc 'a-zA-Z0-9')
    column=$([ "$size" = published ] && echo "cifar10, 24 epochs: " || echo "digits, ")
    case $setting in dropout*) column="${column}averaged patches, dropout" ;;
    Adam*) column="${column}the same" ;; *) column="${column}ours" ;; esac
    $python experiments/in_time.py t-vits --size "$size" --seeds "$seeds" --column "$column" \
        --row vanilla --row weight --row learned --seconds "$seconds" \
        --data-dir "$cells/data" --out "$cells/$name" \
        > "$results/$name.log" 2>&1 &
done
wait
for folder in "$cells"/*/; do
    name=$(basename "$folder")
    [ -f "$folder/results.json" ] && cp "$folder/results.json" "$results/$name.json"
done
cat "$results"/*.log
