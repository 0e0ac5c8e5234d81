#!/usr/bin/env bash
# Makes a project ready for cloudbuild.yaml, once, and again when deploy.yaml has changed: the buckets, the two accounts
# and the trigger that asks for approval. Run by an owner of the project, at the top of the repository:
#   infra/cloudbuild/setup.sh PROJECT REGION [KEY=VALUE of deploy.yaml's substitutions...]
set -euo pipefail
project=$1 region=$2
shift 2
bucket=$project-penstock-state sboms=$project-penstock-sboms topic=penstock-releases
build=penstock-build@$project.iam.gserviceaccount.com deploy=penstock-deploy@$project.iam.gserviceaccount.com

gcloud services enable --project "$project" artifactregistry.googleapis.com cloudbuild.googleapis.com \
  cloudresourcemanager.googleapis.com containeranalysis.googleapis.com iam.googleapis.com \
  ondemandscanning.googleapis.com pubsub.googleapis.com run.googleapis.com serviceusage.googleapis.com \
  storage.googleapis.com
there() { "$@" --project "$project" > /dev/null 2>&1; }
for name in "$bucket" "$sboms"; do
  there gcloud storage buckets describe "gs://$name" || gcloud storage buckets create "gs://$name" \
    --project "$project" --location "$region" --uniform-bucket-level-access --public-access-prevention
done
gcloud storage buckets update "gs://$bucket" --versioning
there gcloud pubsub topics describe "$topic" || gcloud pubsub topics create "$topic" --project "$project"
for name in penstock-build penstock-deploy; do
  there gcloud iam service-accounts describe "$name@$project.iam.gserviceaccount.com" ||
    gcloud iam service-accounts create "$name" --project "$project"
done

grant() { # ACCOUNT ROLE...
  local account=$1 role
  shift
  for role in "$@"; do
    gcloud projects add-iam-policy-binding "$project" --member "serviceAccount:$account" --role "roles/$role" \
      --condition None --quiet > /dev/null
  done
}
# Writes images, scans and notes on them; reads what a plan compares with, the secrets' versions among it.
grant "$build" artifactregistry.writer containeranalysis.notes.editor containeranalysis.occurrences.editor \
  iam.securityReviewer logging.logWriter ondemandscanning.admin secretmanager.secretAccessor \
  serviceusage.serviceUsageConsumer viewer
gcloud pubsub topics add-iam-policy-binding "$topic" --project "$project" --member "serviceAccount:$build" \
  --role roles/pubsub.publisher > /dev/null
# One role for each kind of thing that the platform is made of; none of owner and editor.
grant "$deploy" artifactregistry.admin bigquery.admin cloudscheduler.admin compute.admin container.admin iam.roleAdmin \
  iam.serviceAccountAdmin iam.serviceAccountUser iam.workloadIdentityPoolAdmin logging.logWriter memorystore.admin \
  monitoring.admin networkconnectivity.consumerNetworkAdmin pubsub.admin resourcemanager.projectIamAdmin run.admin \
  secretmanager.admin serviceusage.serviceUsageAdmin storage.admin
for account in "$build" "$deploy"; do
  gcloud storage buckets add-iam-policy-binding "gs://$bucket" --member "serviceAccount:$account" \
    --role roles/storage.objectAdmin > /dev/null
done

# May add lists of what is in images, and change none.
gcloud storage buckets add-iam-policy-binding "gs://$sboms" --member "serviceAccount:$build" \
  --role roles/storage.objectCreator > /dev/null

# The trigger holds deploy.yaml itself: what is approved can't bring steps of its own. gcloud reads it from a file only.
trigger=$(mktemp)
trap 'rm -f "$trigger"' EXIT
{
  printf 'name: penstock-deploy\napprovalConfig: {approvalRequired: true}\n'
  printf 'serviceAccount: projects/%s/serviceAccounts/%s\n' "$project" "$deploy"
  printf 'pubsubConfig: {topic: projects/%s/topics/%s}\n' "$project" "$topic"
  # shellcheck disable=SC2016
  printf 'substitutions:\n  _RELEASE: $(body.message.data.release)\n'
  for given in "$@"; do printf '  %s: "%s"\n' "${given%%=*}" "${given#*=}"; done
  printf 'build:\n'
  sed '/^serviceAccount:/d; s/^/  /' infra/cloudbuild/deploy.yaml
} > "$trigger"
gcloud builds triggers import --project "$project" --region "$region" --source "$trigger"
