#!/usr/bin/env bash
# Builds and pushes the worker's image: worker_image.sh [OPTION...]. Each folder of CLASSES_DIR, if that is not empty, has a
# class that brings packages. They get their environments in the image.
set -euo pipefail
if [ -n "$CLASSES_DIR" ]; then set -- "$@" --build-context "classes=$CLASSES_DIR"; fi
exec bash infra/cloudbuild/image.sh worker "$@"
