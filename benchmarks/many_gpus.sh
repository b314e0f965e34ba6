#!/usr/bin/env bash
# The GPUs of one host, at most nine minutes, a short table last: what 8, 4, 2 or 1 of them do in updates (a: FSDP2, b: Megatron-Core),
# in PPO steps (c: trainers and engines on the same GPUs, d: on own ones, synchronous and ahead) and in a weight sync (e).
#
#     benchmarks/many_gpus.sh [--gpus N] [--parts a,b,e] [--seconds 525] [--out DIR]
#     benchmarks/many_gpus.sh --cpu                     # a dry run: two gloo ranks, tiny shapes; tries the code, measures nothing
#     PYTHON="uv run python" benchmarks/many_gpus.sh    # PYTHON is python3 else
set -uo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2 && exit 2; }

gpus="" parts="a,b,e,c,d" seconds=525 out="" cpu=""
while [ $# -gt 0 ]; do
    case "$1" in
    --gpus) gpus="$2" && shift ;;
    --parts) parts="$2" && shift ;;
    --seconds) seconds="$2" && shift ;;
    --out) out="$2" && shift ;;
    --cpu) cpu="--cpu" ;;
    *) usage ;;
    esac
    shift
done
[[ "$parts" =~ ^[a-e](,[a-e])*$ && "$gpus$seconds" =~ ^[0-9]+$ ]] || usage
read -ra python <<<"${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # as in a run: teams of many processes wait for each other's cores
# NVLink multicast stays off: not every host lets a process have it.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

ends=$((SECONDS + seconds))
if [ -n "$cpu" ]; then
    gpus=2
    export CUDA_VISIBLE_DEVICES="" RAY_memory_monitor_refresh_ms=0
else
    found="$("${python[@]}" -c 'import torch; print(torch.cuda.device_count())')" || exit 1
    gpus="${gpus:-$found}"
    if [ "$gpus" -lt 1 ] || [ "$gpus" -gt "$found" ]; then
        echo "$gpus GPUs were asked for, torch sees $found here: give --gpus a number up to that, or --cpu for a dry run" >&2
        exit 2
    fi
fi
scratch="$(mktemp -d "${TMPDIR:-/tmp}/many-gpus-XXXXXX")"
part_pid=""
clean() {
    [ -z "$part_pid" ] || kill -KILL -- "-$part_pid" 2>/dev/null
    rm -rf "$scratch"
}
trap clean EXIT
out="${out:-$scratch}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"

note() { printf '{"part": "%s", "text": "%s"}\n' "$1" "$(tr -d '\\"\000-\037' <<<"$2" | cut -c1-300)" >>"$out/notes.jsonl"; }

# What each part takes of the time that is left, against those that are still to come. Parts whose figures are surest come first.
weight() { case "$1" in a) echo 140 ;; b) echo 120 ;; c) echo 200 ;; d) echo 220 ;; e) echo 45 ;; esac }
left=()
for part in a b e c d; do [[ ",$parts," == *",$part,"* ]] && left+=("$part"); done
while [ ${#left[@]} -gt 0 ]; do
    part="${left[0]}" total=0
    for other in "${left[@]}"; do total=$((total + $(weight "$other"))); done
    limit=$(((ends - SECONDS) * $(weight "$part") / total))
    begin=$SECONDS
    left=("${left[@]:1}")
    if [ "$limit" -lt 4 ]; then
        note "$part" "not begun: no time was left for it"
        continue
    fi
    # timeout leads a process group: whatever is left of the part ends with it.
    has=$((limit > 20 ? limit - 8 : limit / 2))
    timeout --kill-after=8 "$has" "${python[@]}" -m benchmarks.many_gpus "$part" --gpus "$gpus" $cpu --seconds "$has" \
        --out "$out" --scratch "$scratch" >"$out/$part.log" 2>&1 &
    part_pid=$!
    wait "$part_pid"
    status=$?
    kill -KILL -- "-$part_pid" 2>/dev/null
    part_pid=""
    took=$((SECONDS - begin))
    case "$status" in
    0) note "$part" "$took s" ;;
    124 | 137 | 143) note "$part" "not done in the $limit s that were left for it; what it measured by then is above" ;;
    *) note "$part" "failed after $took s, exit code $status: $(grep -v '^\s*$' "$out/$part.log" | tail -n 1)" ;;
    esac
    [ "$status" -eq 0 ] || tail -n 12 "$out/$part.log" | cut -c1-200 >&2
    echo "part $part: exit code $status, $took s" >&2
done
echo
if [ -n "$cpu" ]; then echo "a dry run on a CPU: these figures mean nothing"; else echo "$gpus GPUs, $SECONDS s in all"; fi
"${python[@]}" -m benchmarks.many_gpus table --out "$out"
