#!/usr/bin/env bash
# What the Dockerfiles of API, functions and servers install, installed by the same words into empty environments, and their
# entry points started there. About two minutes; var/image-check keeps nothing from run to run. The worker's, with its
# gigabytes, is left to the build (and to tests/image_trial).
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$PWD/var/image-check
python=${PYTHON:-python3.11}
rm -rf "$work"
mkdir -p "$work"
top=$PWD
# What the builder's Python has in an image.
"$python" -m venv "$work/builder"
"$python" infra/lock.py only uv > "$work/uv.txt"
"$work/builder/bin/pip" install --quiet --disable-pip-version-check --require-hashes --requirement "$work/uv.txt"
index=$("$work/builder/bin/pip" config get global.index-url 2> /dev/null || true)
test -z "$index" || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"

# What .dockerignore lets through, and the Dockerfile copies.
prepare() { # IMAGE PATH...
  local image=$1
  shift
  mkdir -p "$work/$image/src"
  tar --create --exclude __pycache__ --exclude infra/terraform --exclude 'emulators/*/tests' pyproject.toml constraints.txt LICENSE README.md \
    infra/lock.py "$@" | tar --extract --directory "$work/$image/src"
  cd "$work/$image/src"
  cp infra/lock.py .
  [ "$image" != functions ] || rm -r infra
  # shellcheck disable=SC2046
  "$python" lock.py requirements $(sed -n 's/^RUN python lock.py requirements \(.*\) > .*/\1/p' \
    "$top/infra/docker/$image.Dockerfile") > requirements.txt
  "$python" lock.py build > build.txt
  "$python" -m venv --without-pip "$work/$image/venv"
  "$work/builder/bin/uv" pip install --quiet --python "$work/$image/venv/bin/python" --require-hashes \
    --constraint constraints.txt --requirement requirements.txt
  "$work/builder/bin/uv" pip install --quiet --python "$work/builder/bin/python" --require-hashes \
    --constraint constraints.txt --requirement build.txt
  local ours=(.)
  [ "$image" != servers ] || ours+=(./emulators/bigquery ./emulators/pubsub)
  "$work/builder/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-index \
    --no-build-isolation --wheel-dir "$work/$image/wheels" "${ours[@]}"
  "$work/builder/bin/python" -m pip --python "$work/$image/venv/bin/python" install --quiet --disable-pip-version-check \
    --no-deps --no-index --target "$work/$image/app" "$work/$image/wheels/"*.whl
  cd "$work/$image/app"
}
inside() { # IMAGE COMMAND...
  local image=$1
  shift
  env -i PATH="$work/$image/venv/bin:$work/$image/app/bin:/usr/bin:/bin" PYTHONPATH="$work/$image/app" "$@"
}
without() { # IMAGE PACKAGE...
  local image=$1 package
  shift
  for package in "$@"; do
    if inside "$image" python -c "import $package" 2> /dev/null; then
      echo "$image has $package" >&2
      exit 1
    fi
  done
}

(prepare api shared infra api
  inside api penstock api --help > /dev/null
  inside api python -c 'import api.app, infra.cli.main'
  # Nothing is there to connect to; what it lacks first is its catalog.
  answer=$(inside api penstock api 2>&1 || true)
  [[ $answer == "penstock api: "*models.yaml* ]] || { echo "api said: $answer" >&2; exit 1; }
  answer=$(inside api penstock predict folder 2>&1 || true)
  [[ $answer == "penstock predict needs the package workers, "* ]] || { echo "predict said: $answer" >&2; exit 1; }
  inside api python -c 'import infra.row_archive.__main__'
  without api torch transformers workers pytest)
echo "api: installs, starts, and has no torch"
(prepare functions shared workers/__init__.py workers/functions
  inside functions python -c 'import runpy; runpy.run_path("workers/functions/main.py", run_name="main")'
  without functions torch transformers fastapi api infra)
echo "functions: installs, loads, and has no torch"
(prepare servers shared infra emulators
  inside servers penstock pubsub --help > /dev/null
  inside servers penstock bigquery --help > /dev/null
  inside servers penstock provision --help > /dev/null
  inside servers python -c 'import pubsub_emulator, bigquery_emulator'
  inside servers python -c 'import infra.local.provision_servers'
  without servers torch transformers api workers fastapi)
echo "servers: installs, loads, and has no torch"
rm -rf "$work"
