#!/usr/bin/env bash
# What the images are built on, by digest, and what builds them: a builder of its own, which can keep a cache in the
# registry. release/ is what comes out of a build.
set -euo pipefail
mkdir -p release
infra/docker/pin.sh "$PWD/release/bases.env"
docker buildx create --name penstock --driver docker-container --use
