#!/usr/bin/env bash
# Keeps each image's list of parts, and notes alongside the image where it is: `gcloud artifacts sbom list` finds it. gcloud
# would make a separate bucket for them, which the account may not. In the bucket it may only add, so the lists of a
# build have a separate folder: an image that is built again has the same name.
set -euo pipefail
for image in api functions worker; do
  gcloud artifacts sbom load --source "release/$image.spdx.json" --uri "$(cat "release/$image.image")" \
    --destination "gs://$SBOM_BUCKET/$BUILD_ID"
done
