#!/bin/sh
# Plans the Terraform root with the release's images; the plan, and the same to read, go into the release.
set -eu
top=$PWD
cp release/images.auto.tfvars.json "$ROOT/"
sh infra/cloudbuild/state.sh "$ROOT" platform
# The examples have it as a variable. A root that has none, or says it in a file, is not disturbed.
export TF_VAR_registry_location="$LOCATION"
# Without a lock, which would be a write into the state's bucket. Terraform refuses a plan that was overtaken.
terraform -chdir="$ROOT" plan -input=false -no-color -lock=false -var "project_id=$PROJECT_ID" \
  -out "$top/release/saved.plan"
terraform -chdir="$ROOT" show -no-color "$top/release/saved.plan" > release/plan.txt
# What the plan was made with: the providers' versions, and the state's place.
cp "$ROOT/.terraform.lock.hcl" release/
