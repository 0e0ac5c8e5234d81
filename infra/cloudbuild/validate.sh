#!/bin/sh
# Format and validity of all Terraform code, with the real providers; their tests run where their stand-in is.
set -eu
cd "$(dirname "$0")/../terraform"
terraform fmt -check -diff -recursive .
for folder in platform workloads examples/*; do
  terraform -chdir="$folder" init -backend=false -input=false -no-color > /dev/null
  echo "$folder: $(terraform -chdir="$folder" validate -no-color)"
done
