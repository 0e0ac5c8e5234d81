#!/bin/sh
# Puts the state of a root into the bucket, unless the root says itself where it is: state.sh ROOT NAME.
set -eu
root=$1 name=$2
rm -f "$root/state_override.tf" # of another region
if grep -qs 'backend "' "$root"/*.tf; then
  exec terraform -chdir="$root" init -input=false -no-color
fi
printf 'terraform {\n  backend "gcs" {}\n}\n' > "$root/state_override.tf"
exec terraform -chdir="$root" init -input=false -no-color -reconfigure \
  -backend-config "bucket=$STATE_BUCKET" -backend-config "prefix=$name"
