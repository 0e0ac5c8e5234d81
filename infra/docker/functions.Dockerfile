# The functions behind Pub/Sub push and Cloud Scheduler, each a service of this image: FUNCTION_TARGET says which it is.
ARG PYTHON_BASE

FROM ${PYTHON_BASE} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt infra/lock.py ./
RUN python lock.py requirements functions > requirements.txt \
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
COPY workers/__init__.py workers/
COPY workers/functions workers/functions
# Apart from the dependencies, so that a change of ours is a small layer; with its metadata, for the SBOM.
RUN python -m pip wheel --disable-pip-version-check --no-cache-dir --no-deps --no-index --no-build-isolation \
    --wheel-dir /wheels . \
    && python -m pip --python /opt/venv/bin/python install --disable-pip-version-check --no-cache-dir --no-deps \
      --no-index --target /app /wheels/*.whl

FROM ${PYTHON_BASE}
# Cloud Run says the port (PORT), Terraform the target.
ENV FUNCTION_SOURCE=workers/functions/main.py \
    HOME=/tmp \
    PATH=/opt/venv/bin:$PATH \
    PENSTOCK_MODELS_FILE=/etc/penstock/models.yaml \
    PORT=8080 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1
RUN groupadd --gid 10001 penstock \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin penstock \
    && install -d /etc/penstock \
    && install -d -o 10001 -g 10001 /var/lib/penstock/objects
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
WORKDIR /app
USER 10001:10001
EXPOSE 8080
# For `docker run`; Cloud Run has probes of its own. A GET asks for nothing and is answered.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/', timeout=4)"]
ENTRYPOINT ["python", "-m", "functions_framework"]

ARG PYTHON_BASE
ARG REVISION=unknown
ARG VERSION=unknown
LABEL org.opencontainers.image.title="penstock-functions" \
      org.opencontainers.image.description="Penstock's functions: dead letters, webhooks and reports" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${PYTHON_BASE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.version="${VERSION}"
