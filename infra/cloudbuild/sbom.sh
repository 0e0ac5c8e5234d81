#!/usr/bin/env bash
# Puts each image's list of parts beside it, where Artifact Analysis and `gcloud artifacts sbom list` find it.
set -euo pipefail
for image in api functions worker; do
  gcloud artifacts sbom load --source "release/$image.spdx.json" --uri "$(cat "release/$image.image")"
done
