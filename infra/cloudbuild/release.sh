#!/usr/bin/env bash
# Keeps the release, and asks for its approval: the message makes the trigger of deploy.yaml start a build that waits.
# So the account of this build needs no right to start builds, nor to act as the one that deploys. The message has the
# digest of the manifest, which has those of all files, so nothing of a release can change after its approval.
set -euo pipefail
folder=gs://$RELEASES_BUCKET/releases/$BUILD_ID
tar --create --gzip --file release/source.tgz --exclude ./.venv --exclude ./release --exclude ./.git \
  --exclude '.terraform' --exclude '__pycache__' .
files=$(cd release && find . -type f ! -name manifest | sort)
# No name has a space.
# shellcheck disable=SC2086
(cd release && sha256sum $files > manifest)
digest=$(sha256sum release/manifest | cut -d ' ' -f 1)
images=$(cat release/api.image release/functions.image release/worker.image | xargs)
gcloud storage cp --recursive 'release/*' release/.terraform.lock.hcl "$folder/"
echo "release: $folder, digest $digest; what it changes is in $folder/plan.txt"
if [ -n "$TOPIC" ]; then
  gcloud pubsub topics publish "$TOPIC" \
    --message "{\"release\": \"$folder\", \"digest\": \"$digest\", \"images\": \"$images\"}"
fi
