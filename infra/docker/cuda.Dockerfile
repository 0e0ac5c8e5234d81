# The standard CUDA base of all workers: Python, torch with its CUDA libraries, a C compiler, and the way to the
# driver. It changes with torch, not with our code, so every worker image shares its layers.
ARG PYTHON_BASE

FROM ${PYTHON_BASE} AS build
WORKDIR /src
COPY constraints.txt infra/lock.py ./
RUN python lock.py pins > pins.txt \
    && grep '^torch==' pins.txt > torch.txt \
    && python lock.py only uv > uv.txt \
    && python -m venv --without-pip /opt/venv
# torch's wheel for Linux on the Python index is the CUDA one and brings CUDA's libraries as wheels; another build is
# taken from an index of its own, as https://download.pytorch.org/whl/cu126, or .../cpu. The lock has the hashes of the
# first. It brings CUDA's libraries in the versions that its metadata names, of which the lock has none.
ARG TORCH_INDEX=
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=cache,target=/root/.cache/uv --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    export UV_LINK_MODE=copy \
    && python -m pip install --disable-pip-version-check --require-hashes --requirement uv.txt \
    && if [ -z "$TORCH_INDEX" ]; then set -- --verify-hashes --constraint constraints.txt; \
      else set -- --index-url "$TORCH_INDEX" --constraint pins.txt; fi \
    && uv pip install --python /opt/venv/bin/python "$@" --requirement torch.txt

FROM ${PYTHON_BASE}
# torch.compile has Triton build its launchers with a C compiler when a model is warmed up.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 penstock \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin penstock
# GKE puts the driver into /usr/local/nvidia; the NVIDIA runtime of other machines goes by the two variables.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all \
    PATH=/opt/venv/bin:/usr/local/nvidia/bin:$PATH
COPY --from=build /opt/venv /opt/venv
USER 10001:10001

ARG PYTHON_BASE
ARG REVISION=unknown
ARG VERSION=unknown
LABEL org.opencontainers.image.title="penstock-cuda" \
      org.opencontainers.image.description="CUDA base of Penstock's workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${PYTHON_BASE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.version="${VERSION}"
