#!/usr/bin/env bash
# Installs into .venv (or $VENV) and runs the demonstration on two processes. Arguments go to run_translation.py.
set -euo pipefail
cd "$(dirname "$0")"
venv="${VENV:-.venv}"
python3 -m venv "$venv"
. "$venv/bin/activate"
python -m pip install --quiet --requirement requirements.txt
exec torchrun --nproc_per_node 2 run_translation.py --deepspeed configs/ds_config_zero3.json "$@"
