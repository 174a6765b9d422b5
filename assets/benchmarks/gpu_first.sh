#!/usr/bin/env bash
# The first 8 minutes on GPUs: check the host, train a few steps of 8B in bfloat16 and float8 and of 1B, write a profile, and
# print a table with the measurements beside the forecasts of `plan`.
#
#   assets/benchmarks/gpu_first.sh           on all GPUs of this host
#   DRY=1 assets/benchmarks/gpu_first.sh     the same script with the debug model on two CPU ranks
#
# Each run ends after MOST_S seconds, so a run that hangs does not stop the script. It was run with DRY=1 only, never on a
# GPU.
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-outputs/gpu_first}
MOST_S=${MOST_S:-150}
KEYS=(--training.steps=12 --metrics.log_freq=1 --checkpoint.no_enable --validation.no_enable --job.overwrite)

tool() { python3 -m torchtitan_lite "$@"; }

if [[ -n ${DRY:-} ]]; then
    export CUDA_VISIBLE_DEVICES="" NGPU=2
    gpu=cpu
    large=(--config debug)
    small=(--config debug)
    float8=(--model.converters float8 --quantize.linear.float8.emulate)
else
    names=$(nvidia-smi --query-gpu=name --format=csv,noheader) || exit 2
    export NGPU=${NGPU:-$(wc -l <<<"$names")}
    gpu=$(python3 -c "import sys; from torchtitan_lite.tools.plan.cluster import find_gpu_row; print(find_gpu_row(sys.argv[1]))" "$names")
    large=(--config llama3_8b)
    [[ $NGPU != 1 ]] || large=(--config llama3_8b_one_gpu --training.global_batch_size=4)
    small=(--config llama3_1b)
    float8=(--model.converters float8)
fi

# train NAME KEY...: forecast, check and train; keep everything in $OUT/NAME
train() {
    local name=$1 folder=$OUT/$1
    shift
    mkdir -p "$folder"
    tool plan --json --gpu "$gpu" --gpus "$NGPU" "$@" "${KEYS[@]}" >"$folder.plan.json" 2>"$folder.plan.txt"
    timeout "$MOST_S" ./run_train.sh "$@" "${KEYS[@]}" --job.dump_folder "$folder" 2>&1 | tee "$folder.screen.txt" | tail -n 2
    echo "$name: status ${PIPESTATUS[0]}, ${SECONDS} s since the start"
}

mkdir -p "$OUT"
echo "The column \"on paper\" is \`plan --gpu $gpu --gpus $NGPU\` (h100 if no row of plan has this GPU's name)."
tool check "${large[@]}" "${KEYS[@]}" --job.dump_folder "$OUT/large" || exit 2
train large "${large[@]}"
train large_float8 "${large[@]}" "${float8[@]}"
train small "${small[@]}"
train profile "${small[@]}" --profiling.enable_profiling --profiling.profile_freq=10
tool report "$OUT/profile" --out "$OUT/profile.html"

python3 - "$OUT" <<'END'
import json
import statistics
import sys
from pathlib import Path

out = Path(sys.argv[1])
print("| run | tokens/s/GPU | on paper | MFU | reserved or peak, GiB | on paper, at most | loss of step 1 and last |")
print("|---|---|---|---|---|---|---|")
for name in ("large", "large_float8", "small", "profile"):
    steps = []
    file = out / name / "metrics.jsonl"
    if file.exists():
        records = map(json.loads, file.read_text().splitlines())
        steps = [record for record in records if record["kind"] == "step"]
    cells = ["no step"] * 4 + ["?"]
    if steps:
        late = steps[len(steps) // 2 :]  # the first steps compile
        last = steps[-1]
        memory = last.get("reserved_memory_gib", last["peak_memory_gib"])
        mfu = [step["mfu_full"] for step in late if step["mfu_full"] is not None]
        speed = statistics.median(step["tokens_per_s_per_rank"] for step in late)
        cells = [f"{speed:,.0f}", f"{statistics.median(mfu):.1%}" if mfu else "?", f"{memory:.1f}", f"{steps[0]['loss']:.3f}, {last['loss']:.3f}"]
    try:
        plan = json.loads((out / f"{name}.plan.json").read_text())
        paper = [f"{plan['tokens_per_s_per_gpu']:,.0f}", f"{plan['taken_bytes'] / 2**30:.1f}"]
    except ValueError:
        paper = ["no plan"] * 2
    print("|", " | ".join([name, cells[0], paper[0], cells[1], cells[2], paper[1], cells[3]]), "|")
END
