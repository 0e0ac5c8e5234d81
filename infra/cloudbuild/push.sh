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
# Where the images come from, as SLSA's provenance has it (https://slsa.dev/spec/v1.0/provenance). It is one of the
# files whose digests are approved.
subjects='' bases=''
for image in api functions worker; do
  named=$(cat "release/$image.image")
  subjects+="${subjects:+, }{\"name\": \"${named%@*}\", \"digest\": {\"sha256\": \"${named#*@sha256:}\"}}"
done
while IFS= read -r line; do
  case $line in
    \#*) ;;
    *=*@sha256:*)
      named=${line#*=}
      bases+="${bases:+, }{\"uri\": \"${named%@*}\", \"digest\": {\"sha256\": \"${named#*@sha256:}\"}}"
      ;;
  esac
done < release/bases.env
cat > release/provenance.json <<JSON
{"_type": "https://in-toto.io/Statement/v1", "subject": [$subjects], "predicateType": "https://slsa.dev/provenance/v1",
 "predicate": {"buildDefinition": {"buildType": "urn:penstock:cloudbuild.yaml",
 "externalParameters": {"revision": "$REVISION", "version": "$version"}, "resolvedDependencies": [$bases]},
 "runDetails": {"builder": {"id": "https://cloudbuild.googleapis.com/projects/$PROJECT_ID"},
 "metadata": {"invocationId": "$BUILD_ID"}}}}
JSON
