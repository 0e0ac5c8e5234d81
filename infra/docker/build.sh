#!/usr/bin/env bash
# Builds one image: build.sh api|functions|servers|cuda|worker NAME:TAG [OPTION of the builder...]
# BASES says which file has the bases' digests (infra/docker/bases.env); BUILDER is `docker buildx` or `buildah`.
# The worker stands on CUDA_BASE, from the environment. UNPINNED=yes takes bases as they are, for a trial.
set -euo pipefail
cd "$(dirname "$0")/../.."
image=$1 name=$2
shift 2

given=${CUDA_BASE:-}
# shellcheck source=infra/docker/bases.env
source "${BASES:-infra/docker/bases.env}"
CUDA_BASE=$given
case $image in
  worker) base=CUDA_BASE ;;
  api | functions | servers | cuda) base=PYTHON_BASE ;;
  *) echo "there is no image $image: api, functions, servers, cuda, worker" >&2; exit 2 ;;
esac
if [[ ${!base} != *@sha256:* && ${UNPINNED:-} != yes ]]; then
  echo "$base is '${!base}', without a digest: run infra/docker/pin.sh, or set UNPINNED=yes for a trial" >&2
  exit 2
fi
version=$(sed -n '/^\[project\]/,/^\[/s/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=${REVISION:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
# The builder may be two words.
# shellcheck disable=SC2086
exec ${BUILDER:-docker buildx} build --file "infra/docker/$image.Dockerfile" --tag "$name" \
  --build-arg "$base=${!base}" --build-arg "REVISION=$revision" --build-arg "VERSION=$version" "$@" .
