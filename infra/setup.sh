#!/usr/bin/env bash
# Makes .venv with everything that constraints.txt pins, for `make setup`: PYTHON infra/setup.sh EXTRA,EXTRA
# One line shows the progress. The tools' output goes into .venv/setup.log, and its end is shown if a step fails.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 extras=$2
venv=.venv log=.venv/setup.log
began=$SECONDS
. infra/step.sh

compile() {
  local seldom='/(tests?|testing)/|/test_[^/]*$|/transformers/models/(?!auto|bert|clip)[^/]+/|/diffusers/(modular_)?pipelines/(?!stable_diffusion/)[^/]+/'
  # Some tests import a little of these.
  seldom+='|/site-packages/(mypy|networkx|onnxscript|plotly|pygments|schemathesis|sklearn|torch/_inductor)/'
  local ours=(api emulators infra shared tests tools workers)
  # Some packages carry files for a later Python. Ours too, as all processes of a first run would begin with them at once.
  env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -m compileall -q -j 0 -x "$seldom" "$venv/lib" "${ours[@]}" || true
}

"$python" infra/lock.py check
printf 'Setting up %s:' "$venv"
mkdir -p "$venv"
: > "$log"
test -x "$venv/bin/python" || step "$log" Python "$python" -m venv "$venv"
"$python" infra/lock.py pins > "$venv/pins.txt"
torch=$(grep '^torch==' "$venv/pins.txt")
"$python" infra/lock.py only uv > "$venv/uv.txt"
step "$log" uv "$venv/bin/pip" install --disable-pip-version-check --require-hashes --requirement "$venv/uv.txt"
# Without a cache that can be written, as without a home, uv uses a temporary one.
cache=$("$venv/bin/uv" cache dir 2> /dev/null || true)
if ! mkdir -p "$cache" 2> /dev/null || ! test -w "$cache"; then export UV_NO_CACHE=1; fi
step "$log" torch infra/install_torch.sh "$venv" "$torch"
step "$log" "$(wc -l < "$venv/pins.txt") packages" infra/install_locked.sh "$venv" "$extras"
# What torch brings besides, such as CUDA's libraries; nothing where it is a build for CPUs.
step "$log" "torch's own" "$venv/bin/pip" install --disable-pip-version-check --no-compile \
  --constraint "$venv/pins.txt" "$torch"
# The embedded servers and the tools are in no index.
members=(emulators/bigquery emulators/pubsub tools/load tools/monitoring tools/planning)
step "$log" Penstock env UV_PYTHON_DOWNLOADS=never "$venv/bin/uv" pip install --python "$venv/bin/python" \
  --no-build-isolation --no-deps --editable . \
  "${members[@]/#/--editable=./}"
"$python" infra/relative_paths.py "$venv"
# By all cores and once, instead of by each process that is first; without what hardly any process imports.
step "$log" bytecode compile
# The embedded BigQuery reads SQL with a module that is compiled once per machine.
step "$log" "SQL analyzer" "$venv/bin/python" -m bigquery_emulator.googlesql.analysis
printf ' %s s\n' $((SECONDS - began))
