#!/usr/bin/env bash
# fmt, validate and test of every stage, module and example. Where a registry of providers can be reached, with the real
# ones: they are kept in var/, and no account is used. Elsewhere with the stand-in for them that TFOFFLINE names.
# What could not be checked is said, and passes, as there is nothing to check with.
set -euo pipefail
cd "$(dirname "$0")"

if ! command -v terraform > /dev/null; then
  echo "terraform is not installed: infra/terraform was not checked"
  exit 0
fi
export TF_CLI_CONFIG_FILE=/dev/null
terraform fmt -check -diff -recursive .

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A copy, in which terraform may leave its files; whatever else is read lies alongside it as in the repository.
root=$(cd ../.. && pwd)
mkdir "$work/infra"
ln -s "$root/models.yaml" "$work/"
for entry in "$root"/infra/*; do [ "${entry##*/}" = terraform ] || ln -s "$entry" "$work/infra/"; done
cp -R "$root/infra/terraform" "$work/infra/"
export TF_PLUGIN_CACHE_DIR=$root/var/terraform-providers TF_REGISTRY_CLIENT_TIMEOUT=10 TF_REGISTRY_DISCOVERY_RETRY=0
mkdir -p "$TF_PLUGIN_CACHE_DIR"

initialize() { # FOLDER
  (cd "$work/infra/terraform/$1" && nice terraform init -backend=false -input=false -no-color) 2>&1
}

with_providers() { # VERB FOLDER
  # What a plan asks Google for. The rest is planned without it, so the token is none.
  local target=data.google_project.default file
  [[ $2 != examples/* ]] || target=module.platform.$target
  if [[ $1 == test && $2 =~ ^(platform|examples/.*)/$ ]]; then
    for file in "$work/infra/terraform/$2"tests/*.tftest.hcl; do
      printf '\noverride_data {\n  target = %s\n  values = { number = "123456789012" }\n}\n' "$target" >> "$file"
    done
  fi
  initialize "$2" && (
    cd "$work/infra/terraform/$2"
    unset GOOGLE_CREDENTIALS GOOGLE_APPLICATION_CREDENTIALS
    export GOOGLE_OAUTH_ACCESS_TOKEN=none
    nice terraform validate -no-color && { [ "$1" = validate ] || nice terraform test -no-color; }
  ) 2>&1
}

with_stand_in() { # VERB FOLDER; test validates first
  nice "$TFOFFLINE" -q "$1" "$2" 2>&1
}

if initialize modules/inbox/ > /dev/null; then
  real=yes
elif [ -z "${TFOFFLINE:-}" ]; then
  echo "no registry of providers can be reached, and TFOFFLINE names no stand-in for them:" \
    "infra/terraform is formatted well, but was not validated or tested"
  exit 0
elif command -v "$TFOFFLINE" > /dev/null; then
  echo "no registry of providers can be reached: the stand-in that TFOFFLINE names was taken, not Google's providers"
  real=no
else
  echo "TFOFFLINE names no program: $TFOFFLINE" >&2
  exit 1
fi
failed=0
for folder in modules/*/ platform/ workloads/ examples/*/; do
  verb=validate
  [ -d "${folder}tests" ] && verb='test'
  if output=$(if [ $real = yes ]; then with_providers "$verb" "$folder"; else with_stand_in "$verb" "$folder"; fi); then
    echo "$folder ${output##*$'\n'}"
  else
    echo "$folder failed"
    echo "$output"
    failed=1
  fi
done
exit $failed
