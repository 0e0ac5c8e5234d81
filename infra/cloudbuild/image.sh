#!/usr/bin/env bash
# Builds and pushes one image: image.sh api|functions|cuda|worker [OPTION...]. Its digest is left in release/NAME.json,
# its layers in the registry, where the next build finds them.
set -euo pipefail
image=$1
shift
reference=$REGISTRY/$image
export BASES=$PWD/release/bases.env
if [ "$image" = worker ]; then
  CUDA_BASE=$REGISTRY/cuda@$(sed -n 's/.*"containerimage.digest": "\([^"]*\)".*/\1/p' release/cuda.json)
  export CUDA_BASE
fi
# One manifest without attestations: the scanner and Cloud Run take it by its digest; the SBOM is made apart.
infra/docker/build.sh "$image" "$reference:build-$BUILD_ID" --push --provenance=false --sbom=false \
  --cache-from "type=registry,ref=$reference:cache" \
  --cache-to "type=registry,ref=$reference:cache,mode=max,image-manifest=true,oci-mediatypes=true" \
  --metadata-file "release/$image.json" "$@"
digest=$(sed -n 's/.*"containerimage.digest": "\([^"]*\)".*/\1/p' "release/$image.json")
[[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || { echo "$image: the builder gave no digest" >&2; exit 1; }
echo "$reference@$digest" | tee "release/$image.image"
