#!/usr/bin/env bash
# Installs what extras of pyproject.toml pin, as locked in constraints.txt: infra/install_locked.sh VENV EXTRA,EXTRA
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 extras=$2
index=$("$venv/bin/pip" config get global.index-url 2> /dev/null || true)
test -z "$index" || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
export UV_PYTHON_DOWNLOADS=never
# Penstock, the embedded servers and the tools are in no index: setup.sh installs them from their folders.
members=(emulators/bigquery emulators/pubsub tools/load tools/monitoring tools/planning)
grep -hE '^name = "penstock' pyproject.toml "${members[@]/%//pyproject.toml}" | cut -d '"' -f 2 > "$venv/members.txt"
packages=(--constraint constraints.txt --excludes "$venv/members.txt" --requirement pyproject.toml)
for member in "${members[@]}"; do packages+=(--requirement "$member/pyproject.toml"); done
for extra in ${extras//,/ }; do packages+=(--extra "$extra"); done
"$venv/bin/uv" pip install --python "$venv/bin/python" --verify-hashes "${packages[@]}"
