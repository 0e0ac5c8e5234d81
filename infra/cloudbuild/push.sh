#!/usr/bin/env bash
# Names the images of this build as the release's, by digest; writes what Terraform and the manifests are given.
set -euo pipefail
version=$(sed -n '/^\[project\]/,/^\[/s/^version = "\(.*\)"/\1/p' pyproject.toml)
for image in api functions worker; do
  docker buildx imagetools create --tag "$REGISTRY/$image:$version-${BUILD_ID%%-*}" --tag "$REGISTRY/$image:latest" \
    "$(cat "release/$image.image")"
done
# Both names that the roots of infra/terraform/examples know.
api=$(cat release/api.image) functions=$(cat release/functions.image)
cat > release/images.auto.tfvars.json <<JSON
{"api_image": "$api", "images": {"api": "$api", "dead_letters": "$functions", "reports": "$functions", "webhooks": "$functions"}}
JSON
cat release/images.auto.tfvars.json
