#!/usr/bin/env bash
# Prints the Python of which `make setup` makes .venv: of all 3.11, 3.12 and 3.13 in PATH, in this order, the first that
# was built with optimizations and has all that is needed. Without one it is python3.11, else python3.
set -uo pipefail
here=$(dirname "$0")
for name in python3.11 python3.12 python3.13; do
  while read -r python; do
    if "$python" "$here/python_build.py" < /dev/null 2> /dev/null; then
      echo "$python"
      exit
    fi
  done < <(type -aP "$name")
done
command -v python3.11 || command -v python3 || echo python3
