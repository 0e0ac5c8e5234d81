#!/usr/bin/env bash
# Puts the digest behind every tag of bases.env, as the registry has it today; commit what changes.
# pin.sh FILE writes FILE instead, and keeps the digests that bases.env has: what a build goes by.
# SOURCE says another file than bases.env, from this folder.
set -euo pipefail
cd "$(dirname "$0")"
source=${SOURCE:-bases.env}
target=${1:-$source}
pinned=$(mktemp)
while IFS= read -r line; do
  if [[ $line == *=* && $line != \#* && ($# -eq 0 || $line != *@sha256:*) ]]; then
    tag=${line#*=}
    tag=${tag%@*}
    digest=$(docker buildx imagetools inspect "$tag" --format '{{.Manifest.Digest}}')
    [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || { echo "$tag: the registry gave no digest, but '$digest'" >&2; exit 1; }
    line=${line%%=*}=$tag@$digest
    echo "${line}" >&2
  fi
  printf '%s\n' "$line" >> "$pinned"
done < "$source"
cat "$pinned" > "$target"
rm -f "$pinned"
