#!/usr/bin/env bash
# The benchmark tables: the C++ micro-benchmarks where Google Benchmark is installed, then every
# benchmarks/*.py. Expects an activated build (make bench).
set -euo pipefail
cd "$(dirname "$0")/.."
jobs="${1:-2}"
mkdir -p build

if cmake --preset bench --log-level=ERROR 2>build/bench.log; then
  cmake --build --preset bench -j "$jobs"
  for program in build/bench/benchmarks/*; do
    [[ -f "$program" && -x "$program" ]] && "$program"
  done
else
  echo "bench: no Google Benchmark here, so no C++ micro-benchmarks" >&2
  echo "       (Debian and Ubuntu: apt install libbenchmark-dev)" >&2
fi

shopt -s nullglob
for script in benchmarks/*.py; do
  case "$(basename "$script")" in _*) continue ;; esac
  echo "== $script"
  .venv/bin/python "$script"
done
