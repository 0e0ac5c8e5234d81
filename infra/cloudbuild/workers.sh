#!/bin/sh
# Applies the stage `workloads` in every region. What changes there follows from the approved images and plan.
set -eu
top=$PWD stage=infra/terraform/workloads
while read -r region cluster; do
  sh infra/cloudbuild/state.sh "$stage" "workloads/$region" < /dev/null
  terraform -chdir="$stage" apply -input=false -no-color -lock-timeout=300s -auto-approve \
    -var "project_id=$PROJECT_ID" -var "region=$region" -var "cluster=$cluster" \
    -var "objects_file=$top/var/deploy/$region.yaml" < /dev/null
done < release/clusters
