#!/usr/bin/env bash
# Checks that each package of constraints.txt has a wheel for Linux x86-64 on each Python that Penstock supports, so that
# setup compiles nothing: infra/check_wheels.sh UV. Exits with 1 and the package's name if one has none, and with 2 if the
# index can't be asked. The wheels need glibc 2.31 (Debian 11, Ubuntu 20.04) or later.
set -euo pipefail
cd "$(dirname "$0")/.."
for python in 3.11 3.12 3.13; do
  if ! said=$("$1" pip compile --quiet --no-deps --only-binary :all: --python-version "$python" \
    --python-platform x86_64-manylinux_2_31 constraints.txt 2>&1 > /dev/null); then
    printf 'Python %s: %s\n' "$python" "$said" >&2
    case $said in *'no usable wheels'*) exit 1 ;; *) exit 2 ;; esac
  fi
done
