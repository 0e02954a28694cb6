#!/usr/bin/env bash
# Installs into .venv (or $VENV) and runs the tests, two files at a time. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")"
venv="${VENV:-.venv}"
python3 -m venv "$venv"
. "$venv/bin/activate"
python -m pip install --quiet --requirement requirements-dev.txt
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
