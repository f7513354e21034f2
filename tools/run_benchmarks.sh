#!/usr/bin/env bash
# The benchmark tables: the C++ micro-benchmarks where Google Benchmark is installed, then every
# benchmarks/*.py; gpu_*.py where torch sees a CUDA device. Expects an activated build (make bench).
# All are run; the exit status says whether every one met its bars. cpu_table.py and the tables of
# gpu_*.py write build/<name>.json; gpu_roofline.py draws build/gpu_roofline.png from two of them.
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

gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')

shopt -s nullglob
rm -f build/gpu_*.json # gpu_roofline.py draws this run, or nothing
for script in benchmarks/*.py; do
  run=(.venv/bin/python)
  needed=0
  case "$(basename "$script")" in
    _*) continue ;;
    # They train for minutes to hours. Their docstrings have the commands.
    gpu_parity.py | gpu_inspect.py | gpu_llama8b.py | gpu_lora.py) continue ;;
    gpu_torchtitan*.py) continue ;;
    parity_data.py) continue ;; # it downloads 1.1 GB
    recipe_map.py) continue ;;  # it reads a run of `make train`
    gpu_fsdp.py | gpu_expert_parallel.py | gpu_zero.py)
      needed=2
      run=(.venv/bin/torchrun --nproc-per-node "$gpus")
      ;;
    gpu_*) needed=1 ;;
  esac
  if [ "$gpus" -lt "$needed" ]; then
    echo "== $script: skipped, it needs $needed CUDA devices and torch sees $gpus"
    continue
  fi
  echo "== $script"
  "${run[@]}" "$script" || status=1
done
exit "$status"
