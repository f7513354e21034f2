#!/usr/bin/env bash
# Runs a command whose processes share GPUs by CUDA's multi-process service (MPS), where it is
# installed and starts: else each waits for the others' time slices. Kill none of these processes:
# MPS does not promise that the others go on.
set -euo pipefail
if ! command -v nvidia-cuda-mps-control >/dev/null; then exec "$@"; fi
folder=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY=$folder CUDA_MPS_LOG_DIRECTORY=$folder
if ! nvidia-cuda-mps-control -d; then
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  rm -rf "$folder"
  exec "$@"
fi
trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$folder"' EXIT
"$@"
