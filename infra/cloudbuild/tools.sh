#!/usr/bin/env bash
# What `python -m infra.kubernetes` and `python -m infra.rollout` need: the project's own dependencies, no extras.
set -euo pipefail
python -m venv .venv
python infra/lock.py requirements > requirements.txt
python infra/lock.py pins > pins.txt
.venv/bin/pip install --quiet --disable-pip-version-check --constraint pins.txt --requirement requirements.txt
