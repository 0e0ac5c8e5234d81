#!/usr/bin/env bash
# Says of each image of the release that it was approved. Nodes with nodes.binary_authorization run no other image of
# ours. The key is this account's to use, and not the build's, which runs the code of every dependency.
set -euo pipefail
said() { python3 -c 'import json, sys; print(json.load(open("release/platform.json")).get(sys.argv[1]) or "")' "$1"; }
attestor=$(said attestor) key=$(said attestor_key)
if [ -z "$attestor" ]; then
  echo "nodes.binary_authorization is off: nobody asks for attestations"
  exit 0
fi
for image in api functions worker; do
  named=$(cat "release/$image.image")
  there=$(gcloud container binauthz attestations list --attestor "$attestor" --artifact-url "$named" --format 'value(name)')
  [ -n "$there" ] || gcloud beta container binauthz attestations sign-and-create --artifact-url "$named" \
    --attestor "$attestor" --keyversion "$key"
done
