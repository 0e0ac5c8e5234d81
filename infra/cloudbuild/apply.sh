#!/bin/sh
# Applies the approved plan, and leaves what the next steps go by in the release's folder.
set -eu
top=$PWD
cp release/.terraform.lock.hcl release/images.auto.tfvars.json "$ROOT/"
sh infra/cloudbuild/state.sh "$ROOT" platform
terraform -chdir="$ROOT" apply -input=false -no-color -lock-timeout=300s "$top/release/saved.plan"
terraform -chdir="$ROOT" output -json platform > release/platform.json
terraform -chdir="$ROOT" output -json deployments > release/deployments.json
