#!/usr/bin/env bash
# Keeps the release, and asks for its approval: the message makes the trigger of deploy.yaml start a build that waits.
# So the account of this build needs no right to start builds, nor to act as the one that deploys.
set -euo pipefail
folder=gs://$STATE_BUCKET/releases/$BUILD_ID
tar --create --gzip --file release/source.tgz --exclude ./.venv --exclude ./release --exclude ./.git \
  --exclude '.terraform' --exclude '__pycache__' .
gcloud storage cp --recursive 'release/*' release/.terraform.lock.hcl "$folder/"
echo "release: $folder; what it changes is in $folder/plan.txt"
if [ -n "$TOPIC" ]; then
  gcloud pubsub topics publish "$TOPIC" --message "{\"release\": \"$folder\"}"
fi
