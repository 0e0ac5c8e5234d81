# The API: no torch, no model library.
ARG PYTHON_BASE

FROM ${PYTHON_BASE} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt infra/lock.py ./
RUN python lock.py requirements api > requirements.txt \
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
COPY api api
# Apart from the dependencies, so that a change of ours is a small layer; with its metadata, for the SBOM.
RUN python -m pip wheel --disable-pip-version-check --no-cache-dir --no-deps --no-index --no-build-isolation \
    --wheel-dir /wheels . \
    && python -m pip --python /opt/venv/bin/python install --disable-pip-version-check --no-cache-dir --no-deps \
      --no-index --target /app /wheels/*.whl

FROM ${PYTHON_BASE}
# Cloud Run calls the port that Terraform names. The spool is in the container's own file system there, which is
# memory: a volume of memory belongs to root where containers share it.
ENV HOME=/tmp \
    PATH=/opt/venv/bin:/app/bin:$PATH \
    PENSTOCK_HOST=0.0.0.0 \
    PENSTOCK_MODELS_FILE=/etc/penstock/models.yaml \
    PENSTOCK_PORT=8080 \
    PENSTOCK_SPOOL_DIR=/var/spool/penstock \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1
RUN groupadd --gid 10001 penstock \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin penstock \
    && install -d /etc/penstock \
    && install -d -o 10001 -g 10001 /var/lib/penstock/keys /var/lib/penstock/objects /var/spool/penstock
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
WORKDIR /app
USER 10001:10001
EXPOSE 8080
# For `docker run`; Cloud Run and Kubernetes have probes of their own.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/livez', timeout=4)"]
ENTRYPOINT ["penstock", "api"]

ARG PYTHON_BASE
ARG REVISION=unknown
ARG VERSION=unknown
LABEL org.opencontainers.image.title="penstock-api" \
      org.opencontainers.image.description="Penstock's HTTPS API" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${PYTHON_BASE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.version="${VERSION}"
