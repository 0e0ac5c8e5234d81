# The embedded Pub/Sub and BigQuery, for deployments off Google. The command says which: pubsub, bigquery, provision.
ARG PYTHON_BASE

FROM ${PYTHON_BASE} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt infra/lock.py ./
COPY emulators/bigquery/pyproject.toml emulators/bigquery/
COPY emulators/pubsub/pyproject.toml emulators/pubsub/
RUN python lock.py requirements servers > requirements.txt \
    && python lock.py build > build.txt \
    && python lock.py only uv > uv.txt \
    && python -m venv --without-pip /opt/venv
# What is installed, and what builds our own wheel, has its hash in the lock.
# The secrets are a pip.conf and a uv.toml, for those whose packages come from an index of their own.
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=cache,target=/root/.cache/uv --mount=type=secret,id=uv,target=/etc/uv/uv.toml \
    export UV_LINK_MODE=copy \
    && python -m pip install --disable-pip-version-check --require-hashes --requirement uv.txt \
    && uv pip install --python /opt/venv/bin/python --require-hashes --constraint constraints.txt \
      --requirement requirements.txt \
    && uv pip install --system --require-hashes --constraint constraints.txt --requirement build.txt
COPY LICENSE README.md ./
COPY shared shared
COPY infra infra
COPY emulators/bigquery emulators/bigquery
COPY emulators/pubsub emulators/pubsub
# Apart from the dependencies, so that a change of ours is a small layer; with its metadata, for the SBOM.
RUN python -m pip wheel --disable-pip-version-check --no-cache-dir --no-deps --no-index --no-build-isolation \
    --wheel-dir /wheels . ./emulators/bigquery ./emulators/pubsub \
    && python -m pip --python /opt/venv/bin/python install --disable-pip-version-check --no-cache-dir --no-deps \
      --no-index --target /app /wheels/*.whl \
    # BigQuery's SQL analyzer, compiled for any CPU of this kind: that takes 10 s and 1.1 GB.
    && XDG_CACHE_HOME=/opt/cache PYTHONPATH=/app /opt/venv/bin/python -m bigquery_emulator.googlesql.analysis

FROM ${PYTHON_BASE}
# A volume is mounted at the folder of data.
ENV HOME=/tmp \
    PATH=/opt/venv/bin:/app/bin:$PATH \
    PENSTOCK_MODELS_FILE=/etc/penstock/models.yaml \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/opt/cache
RUN groupadd --gid 10001 penstock \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin penstock \
    && install -d /etc/penstock \
    && install -d -o 10001 -g 10001 /var/lib/penstock
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
COPY --from=build /opt/cache /opt/cache
WORKDIR /app
USER 10001:10001
# Pub/Sub, BigQuery.
EXPOSE 8085 9050
# For `docker run`; Compose and Kubernetes have probes of their own. Whichever server it is takes connections.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import socket as s; any(s.socket().connect_ex(('127.0.0.1', p)) == 0 for p in (8085, 9050)) or exit(1)"]
ENTRYPOINT ["penstock"]

ARG PYTHON_BASE
ARG REVISION=unknown
ARG VERSION=unknown
LABEL org.opencontainers.image.title="penstock-servers" \
      org.opencontainers.image.description="Penstock's embedded Pub/Sub and BigQuery" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${PYTHON_BASE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.version="${VERSION}"
