#!/usr/bin/env bash
# Builds all images and runs them without a Docker daemon or a registry. Needs Debian, root, buildah, and
# debootstrap. The base is the Python of Debian; torch comes from the index in PIP_CONF (a CPU build is enough).
# Takes about 10 GB in var/image-trial. Further arguments, such as --volume, go to the builder.
#   apt-get install buildah debootstrap && PIP_CONF=/etc/pip.conf tests/image_trial/run.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
trial=$PWD/var/image-trial
mkdir -p "$trial"
printf '[storage]\ndriver = "vfs"\nrunroot = "%s/run"\ngraphroot = "%s/images"\n' "$trial" "$trial" > "$trial/storage.conf"
export CONTAINERS_STORAGE_CONF=$trial/storage.conf BUILDAH_ISOLATION=chroot BUILDER=buildah UNPINNED=yes
export BASES=$trial/bases.env CUDA_BASE=localhost/penstock-cuda
pip_conf=${PIP_CONF:-/dev/null}

if ! buildah inspect --type image localhost/python-base > /dev/null 2>&1; then
  debootstrap --variant=minbase --include=ca-certificates,python3-pip,python3-venv bookworm "$trial/base"
  # Where the image of Docker's library has it, and with the certificates that this machine trusts.
  ln -s /usr/bin/python3 "$trial/base/usr/local/bin/python"
  cp /etc/ssl/certs/ca-certificates.crt "$trial/base/etc/ssl/certs/"
  printf 'FROM scratch\nCOPY base/ /\nENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n' > "$trial/Dockerfile"
  buildah build --format docker --file "$trial/Dockerfile" --tag localhost/python-base "$trial"
  rm -r "$trial/base"
fi
echo PYTHON_BASE=localhost/python-base > "$BASES"

options=(--format docker --secret "id=pip,src=$pip_conf" --secret "id=uv,src=${UV_CONF:-/dev/null}" "$@")
for image in api functions cuda; do
  infra/docker/build.sh "$image" "localhost/penstock-$image" "${options[@]}"
done
infra/docker/build.sh worker localhost/penstock-worker --build-arg "MODEL_PACKAGES=$(.venv/bin/python -m infra.docker.model_packages)" "${options[@]}"
.venv/bin/python -m tests.image_trial
