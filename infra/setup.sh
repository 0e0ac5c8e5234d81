#!/usr/bin/env bash
# Makes .venv with everything that constraints.txt pins, for `make setup`: PYTHON infra/setup.sh EXTRA,EXTRA
# One line says how far it is; what the tools say goes into .venv/setup.log, and is shown where one fails.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 extras=$2
venv=.venv log=.venv/setup.log
began=$SECONDS

step() { # WHAT COMMAND...
  printf ' %s' "$1"
  printf '\n== %s, after %s s\n' "${*:2}" $((SECONDS - began)) >> "$log"
  if ! "${@:2}" >> "$log" 2>&1; then
    printf ': failed; %s says\n' "$log" >&2
    tail -n 40 "$log" >&2
    exit 1
  fi
  printf ','
}

compile() {
  local seldom='/(tests?|testing)/|/test_[^/]*$|/transformers/models/(?!auto|bert|clip)[^/]+/|/diffusers/(modular_)?pipelines/(?!stable_diffusion/)[^/]+/'
  local ours=(api emulators infra shared tests workers)
  # Some packages carry files for a later Python. Ours too, as all processes of a first run would begin with them at once.
  env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -m compileall -q -j 0 -x "$seldom" "$venv/lib" "${ours[@]}" || true
}

"$python" infra/lock.py check
printf 'Setting up %s:' "$venv"
mkdir -p "$venv"
: > "$log"
test -x "$venv/bin/python" || step Python "$python" -m venv "$venv"
"$python" infra/lock.py pins > "$venv/pins.txt"
torch=$(grep '^torch==' "$venv/pins.txt")
"$python" infra/lock.py only uv > "$venv/uv.txt"
step uv "$venv/bin/pip" install --disable-pip-version-check --require-hashes --requirement "$venv/uv.txt"
step torch infra/install_torch.sh "$venv" "$torch"
index=$("$venv/bin/pip" config get global.index-url 2> /dev/null || true)
test -z "$index" || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
export UV_PYTHON_DOWNLOADS=never
# The embedded servers are in no index: what they need comes first, they come with Penstock.
members=(emulators/bigquery emulators/pubsub)
grep -hE '^name = "penstock-' "${members[@]/%//pyproject.toml}" | cut -d '"' -f 2 > "$venv/members.txt"
packages=(--constraint constraints.txt --excludes "$venv/members.txt" --requirement pyproject.toml)
for member in "${members[@]}"; do packages+=(--requirement "$member/pyproject.toml"); done
for extra in ${extras//,/ }; do packages+=(--extra "$extra"); done
step "$(wc -l < "$venv/pins.txt") packages" \
  "$venv/bin/uv" pip install --python "$venv/bin/python" --verify-hashes "${packages[@]}"
# What torch brings besides, such as CUDA's libraries; nothing where it is a build for CPUs.
step "torch's own" "$venv/bin/pip" install --disable-pip-version-check --no-compile \
  --constraint "$venv/pins.txt" "$torch"
step Penstock "$venv/bin/uv" pip install --python "$venv/bin/python" --no-build-isolation --no-deps --editable . \
  "${members[@]/#/--editable=./}"
# By all cores and once, instead of by each process that is first; without what hardly any process imports.
step bytecode compile
# The embedded BigQuery reads SQL with a module that is compiled once per machine.
step "SQL analyzer" "$venv/bin/python" -m bigquery_emulator.googlesql.analysis
printf ' %s s\n' $((SECONDS - began))
