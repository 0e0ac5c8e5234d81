#!/usr/bin/env bash
# Makes a project ready for cloudbuild.yaml, once, and again when deploy.yaml or this file has changed: the buckets, the
# two accounts and the trigger that asks for approval. Run by an owner of the project, at the top of the repository:
#   infra/cloudbuild/setup.sh PROJECT REGION [KEY=VALUE of deploy.yaml's substitutions...]
set -euo pipefail
project=$1 region=$2
shift 2
state=$project-penstock-state releases=$project-penstock-releases sboms=$project-penstock-sboms
uploads=$project-penstock-source topic=penstock-releases role=penstock_planner
build=penstock-build@$project.iam.gserviceaccount.com deploy=penstock-deploy@$project.iam.gserviceaccount.com

gcloud services enable --project "$project" artifactregistry.googleapis.com cloudbuild.googleapis.com \
  cloudresourcemanager.googleapis.com containeranalysis.googleapis.com iam.googleapis.com \
  ondemandscanning.googleapis.com pubsub.googleapis.com run.googleapis.com serviceusage.googleapis.com \
  storage.googleapis.com
# On the whole continent, so that state and releases are there when a region is not.
case ${region%%-*} in
  europe) place=eu ;;
  us | asia) place=${region%%-*} ;;
  *) place=$region ;;
esac
there() { "$@" --project "$project" > /dev/null 2>&1; }
for name in "$state" "$releases" "$sboms" "$uploads"; do
  there gcloud storage buckets describe "gs://$name" || gcloud storage buckets create "gs://$name" \
    --project "$project" --location "$place" --uniform-bucket-level-access --public-access-prevention
done
# What was, stays: earlier states, and each release for as long as it may be approved or looked at.
gcloud storage buckets update "gs://$state" --versioning
gcloud storage buckets update "gs://$releases" --retention-period 90d
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
grant_bucket() { # BUCKET ACCOUNT ROLE
  gcloud storage buckets add-iam-policy-binding "gs://$1" --member "serviceAccount:$2" --role "roles/$3" > /dev/null
}
# The account of the build runs the code of every dependency. It writes images, scans and notes on them, and reads how
# things are set, which a plan compares. It reads no data: no secret, no row, no object but of sources, releases, state.
grant "$build" artifactregistry.writer bigquery.metadataViewer cloudscheduler.viewer compute.viewer \
  container.clusterViewer containeranalysis.notes.editor containeranalysis.occurrences.editor iam.roleViewer \
  iam.workloadIdentityPoolViewer logging.logWriter memorystore.viewer monitoring.viewer ondemandscanning.admin \
  pubsub.viewer run.viewer secretmanager.viewer serviceusage.serviceUsageConsumer
# What a plan reads besides, in no role without data.
planner=artifactregistry.repositories.getIamPolicy,iam.serviceAccounts.get,iam.serviceAccounts.getIamPolicy
planner+=,networkconnectivity.serviceConnectionPolicies.get,pubsub.subscriptions.getIamPolicy
planner+=,pubsub.topics.getIamPolicy,resourcemanager.projects.get,resourcemanager.projects.getIamPolicy
planner+=,secretmanager.secrets.getIamPolicy,storage.buckets.get,storage.buckets.getIamPolicy
verb=update
there gcloud iam roles describe "$role" || verb=create
gcloud iam roles "$verb" "$role" --project "$project" --title "Penstock planner" --permissions "$planner" \
  --stage GA --quiet > /dev/null
gcloud projects add-iam-policy-binding "$project" --member "serviceAccount:$build" \
  --role "projects/$project/roles/$role" --condition None --quiet > /dev/null
gcloud pubsub topics add-iam-policy-binding "$topic" --project "$project" --member "serviceAccount:$build" \
  --role roles/pubsub.publisher > /dev/null
# May add a release and lists of what is in images, and change none; reads the state, and locks and writes none.
# gcloud lists a folder before it copies something into it.
grant_bucket "$uploads" "$build" storage.objectViewer
grant_bucket "$state" "$build" storage.objectViewer
grant_bucket "$releases" "$build" storage.objectCreator
grant_bucket "$releases" "$build" storage.objectViewer
grant_bucket "$sboms" "$build" storage.objectCreator
# One role for each kind of thing that the platform is made of; none of owner and editor.
grant "$deploy" artifactregistry.admin bigquery.admin binaryauthorization.attestorsAdmin \
  binaryauthorization.policyEditor cloudkms.admin cloudkms.signerVerifier cloudscheduler.admin compute.admin \
  container.admin containeranalysis.notes.editor containeranalysis.occurrences.editor iam.roleAdmin \
  iam.serviceAccountAdmin iam.serviceAccountUser iam.workloadIdentityPoolAdmin logging.logWriter memorystore.admin \
  monitoring.admin \
  networkconnectivity.consumerNetworkAdmin pubsub.admin resourcemanager.projectIamAdmin run.admin secretmanager.admin \
  serviceusage.serviceUsageAdmin storage.admin

# What earlier versions of this file gave, and is too much.
for taken in iam.securityReviewer secretmanager.secretAccessor viewer; do
  gcloud projects remove-iam-policy-binding "$project" --member "serviceAccount:$build" --role "roles/$taken" \
    --condition None --quiet > /dev/null 2>&1 || true
done
for account in "$build" "$deploy"; do
  gcloud storage buckets remove-iam-policy-binding "gs://$state" --member "serviceAccount:$account" \
    --role roles/storage.objectAdmin > /dev/null 2>&1 || true
done

# The trigger holds deploy.yaml itself: what is approved can't bring steps of its own. gcloud reads it from a file only.
# Whoever approves sees the digests of the release and of its images, and what runs is checked against them.
trigger=$(mktemp)
trap 'rm -f "$trigger"' EXIT
{
  printf 'name: penstock-deploy\napprovalConfig: {approvalRequired: true}\n'
  printf 'serviceAccount: projects/%s/serviceAccounts/%s\n' "$project" "$deploy"
  printf 'pubsubConfig: {topic: projects/%s/topics/%s}\n' "$project" "$topic"
  printf 'substitutions:\n'
  # shellcheck disable=SC2016
  for name in RELEASE DIGEST IMAGES; do printf '  _%s: $(body.message.data.%s)\n' "$name" "${name,,}"; done
  for given in "$@"; do printf '  %s: "%s"\n' "${given%%=*}" "${given#*=}"; done
  printf 'build:\n'
  sed '/^serviceAccount:/d; s/^/  /' infra/cloudbuild/deploy.yaml
} > "$trigger"
gcloud builds triggers import --project "$project" --region "$region" --source "$trigger"
