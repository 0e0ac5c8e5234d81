#!/usr/bin/env bash
# fmt, validate and test of every stage, module and example, with a stand-in for the providers: no network, no account.
# Needs terraform and the checker tfoffline; where one is missing it says so and passes, as there is nothing to check with.
set -euo pipefail
cd "$(dirname "$0")"
checker=${TFOFFLINE:-../../../shared/tools/tfoffline/tfoffline}

if ! command -v terraform >/dev/null; then
  echo "terraform is not installed: infra/terraform was not checked"
  exit 0
fi
TF_CLI_CONFIG_FILE=/dev/null terraform fmt -check -diff -recursive .
if ! command -v "$checker" >/dev/null; then
  echo "tfoffline is not there (set TFOFFLINE to it): formatted well, but not validated or tested"
  exit 0
fi
failed=0
for folder in modules/*/ platform/ workloads/ examples/*/; do
  verb=validate
  [ -d "${folder}tests" ] && verb=test # which validates first
  if output=$(nice "$checker" -q $verb "$folder" 2>&1); then
    echo "$folder ${output##*$'\n'}"
  else
    echo "$folder failed"
    echo "$output"
    failed=1
  fi
done
exit $failed
