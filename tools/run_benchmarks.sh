#!/usr/bin/env bash
# The benchmark tables: the C++ micro-benchmarks where Google Benchmark is installed, then every
# benchmarks/*.py; gpu_*.py where torch sees a CUDA device. Expects an activated build (make bench).
# All are run; the exit status says whether every one met its bars. Each table leaves build/<name>.json,
# and on a GPU machine the last one draws build/gpu_roofline.png from them.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs="${1:-2}"
mkdir -p build
status=0

if cmake --preset bench --log-level=ERROR 2>build/bench.log; then
  cmake --build --preset bench -j "$jobs"
  for program in build/bench/benchmarks/*; do
    [[ -f "$program" && -x "$program" ]] || continue
    "$program" || status=1
  done
else
  echo "bench: no Google Benchmark here, so no C++ micro-benchmarks" >&2
  echo "       (Debian and Ubuntu: apt install libbenchmark-dev)" >&2
fi

has_gpu=no
if .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  has_gpu=yes
fi

shopt -s nullglob
rm -f build/gpu_*.json # gpu_roofline.py draws this run, or nothing
for script in benchmarks/*.py; do
  case "$has_gpu $(basename "$script")" in
    *" _"*) continue ;;
    "no gpu_"*)
      echo "== $script: skipped, torch sees no CUDA device"
      continue
      ;;
  esac
  echo "== $script"
  .venv/bin/python "$script" || status=1
done
exit "$status"
