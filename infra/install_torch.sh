#!/usr/bin/env bash
# Installs torch for infra/setup.sh, without what it needs: infra/install_torch.sh VENV REQUIREMENT
# The build for CPUs, unless there is an NVIDIA driver: the default index has the one with CUDA, some 4 GB of libraries
# that nothing would load. Where pip is configured, its indexes decide, as they may have builds for CPUs. The hashes of
# such builds are not those of the lock.
set -euo pipefail
venv=$1 torch=$2
has_driver() { [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi > /dev/null; }
has_indexes() { "$venv/bin/pip" config list | grep -qE 'index-url|find-links'; }
if [ "$(uname -s)" = Linux ] && ! has_driver && ! has_indexes; then
  UV_HTTP_TIMEOUT=30 UV_HTTP_RETRIES=1 \
    "$venv/bin/uv" pip install --python "$venv/bin/python" --torch-backend cpu --no-deps "$torch" && exit
  echo "PyTorch's index of builds for CPUs is unreachable; taking what pip gives"
fi
"$venv/bin/pip" install --disable-pip-version-check --no-compile --no-deps "$torch"
