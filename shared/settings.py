"""All settings, read once from the environment (`PENSTOCK_*`) in each `__main__`, and frozen."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal, TypeVar
from zoneinfo import available_timezones

from pydantic import (
    AfterValidator,
    AliasChoices,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict
from redis.connection import parse_url

from shared.broker.rabbitmq.broker_url import broker_url
from shared.errors import ConfigurationError
from shared.models.class_variables import check_name
from shared.models.entry import MAX_STARTUP_S
from shared.stores.retention import BUDGET_BYTES

SPOOL_MAX_BYTES = 768 * 1024 * 1024
"""About 700,000 uncompressed rows, or four million compressed, as in a long outage (decision 11).

In Kubernetes, a worker's folder may hold 1 GiB. Above that, its pod is evicted along with all rows.
"""

_HOST = re.compile(r"(\*|(\*\.)?[A-Za-z0-9_.-]+)(:[1-9][0-9]{0,4})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@,\s]+")


class Settings(BaseSettings):
    """Settings shared by every process.

    An empty endpoint means Google's own, with the machine's credentials.
    """

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_", frozen=True, extra="ignore")

    project: str = "penstock-local"
    region: str = "local"
    models_file: Path = Path("models.yaml")
    pubsub_endpoint: str = Field(
        "",
        validation_alias=AliasChoices(
            "PENSTOCK_PUBSUB_ENDPOINT", "PUBSUB_EMULATOR_HOST", "pubsub_endpoint"
        ),
    )
    """HOST:PORT or unix:///PATH of an embedded Pub/Sub, or HOST:PORT of Google's emulator."""
    broker: str = ""
    """`rabbitmq://USER:PASSWORD@HOST:PORT/VHOST`, or `rabbitmqs://` for TLS. Empty: Pub/Sub."""
    bigquery_endpoint: str = ""
    """URL of an embedded BigQuery."""
    dataset: str = "penstock"
    redis_url: str = "redis://127.0.0.1:6379/0"
    """Redis for the cache and for leasing a pool's inboxes."""
    records_url: str = ""
    """Redis for records and for responses stored for Idempotency-Keys.

    Empty: the same as for the cache.

    Regions that share topics must share it, because workers of any region may take a job.
    """
    objects_url: str = "file://var/objects"
    """The store of large inputs and results: file://, gs:// or s3://."""
    rows_url: str = ""
    """Object store for rows: file://, gs:// or s3://. Empty: rows go directly to BigQuery.

    From there, `python -m infra.row_archive` copies them to BigQuery and to Parquet files.
    """
    spool_dir: Path = Path("var/spool")
    """Folder of rows that BigQuery does not have yet, with one folder per kind of worker."""
    spool_max_bytes: int = Field(SPOOL_MAX_BYTES, ge=1)
    """Maximum bytes of rows stored there. Above it, new ones are kept in memory."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @field_validator("redis_url", "records_url")
    @classmethod
    def _is_redis_url(cls, url: str, info: ValidationInfo) -> str:
        if url or info.field_name == "redis_url":
            parse_url(url)  # type: ignore[no-untyped-call]
        return url

    @field_validator("rows_url")
    @classmethod
    def _outlives_the_process(cls, url: str) -> str:
        if url.startswith("memory:"):
            raise ValueError(
                "must not be memory:// because its contents are lost when the process exits"
            )
        return url

    @field_validator("broker")
    @classmethod
    def _is_broker_url(cls, url: str) -> str:
        if url:
            broker_url(url)
        return url

    @property
    def messaging_system(self) -> str:
        """The broker's name in OpenTelemetry's conventions."""
        return "rabbitmq" if self.broker else "gcp_pubsub"

    @property
    def records_redis_url(self) -> str:
        """The URL of the Redis that has the records."""
        return self.records_url or self.redis_url


class InvoiceSettings(Settings):
    """Settings shared by processes that create invoices."""

    invoice_seller: str = ""
    """Name and address of the seller on invoices, in lines. Empty: none is shown."""
    invoice_tax_name: str = "Tax"
    """Name of the tax line, such as VAT."""
    invoice_tax_percent: Annotated[Decimal, AfterValidator(abs)] = Field(Decimal(0), ge=0, le=100)
    """Tax added to the total of invoices, in percent. 0: invoices have no tax line."""


class ApiSettings(InvoiceSettings):
    """The API process."""

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    tls_cert: str = ""
    """Path of the API's certificate chain (PEM).

    Empty: plain HTTP, for use behind a proxy that terminates TLS. A new certificate is read at the
    next start.
    """
    tls_key: str = Field("", validate_default=True)
    """Path of its key (PEM, without a password)."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = Field(9464, ge=0, le=65535)
    """Port of /metrics for Prometheus, separate from the API's port. 0: none."""
    public_url: str = ""
    """Public URL of this API, for links in answers. Empty: the URL of the request."""
    trusted_proxies: str = ""
    """Addresses and networks of trusted proxies, comma-separated.

    Their X-Forwarded-Proto is used. Empty: none. `*`: all, for environments where only a proxy can
    connect, such as Cloud Run.
    """
    cors_origins: str = ""
    """Origins whose pages may call this API from a browser, comma-separated, or `*`. Empty: none.
    """
    secret: str = ""
    """The key that signs links to results.

    Empty: a random key per process, so links become invalid when it ends.
    """
    keys_url: str = ""
    """Store of API keys, tenants and plans: file:///PATH, redis://HOST or rediss://HOST.

    Empty: keys are not required, all callers are the `default` tenant, and the API listens only on
    loopback.
    """
    max_in_flight: int = Field(8192, ge=1)
    """Maximum number of this instance's items waiting for a worker.

    Above it, 429, except for tenants below their fair share. `bodies_max_bytes` limits their
    memory.
    """
    broker_wait_s: float = Field(0.5, gt=0, le=60)
    """How long jobs should wait at the broker. Beyond that, they wait in the API, in fair order."""
    reply_slots: int = Field(8, ge=1, le=200)
    """Slots of an inbox created by this instance. The inboxes of a pool have the same number."""
    inbox_pool: int = Field(0, ge=0)
    """Number of inboxes in the pool, leased through Redis. 0: this instance creates its own inbox.
    """
    inbox_first: int = Field(0, ge=0)
    """Number of the pool's first inbox.

    Regions with separate Redis servers for leases must use distinct numbers.
    """
    inbox_lease_s: float = Field(30.0, gt=0)
    idempotency_keep_s: float = Field(86_400.0, gt=0)
    """How long to repeat the response to a request with an Idempotency-Key."""
    idempotency_lease_s: float = Field(6.0, gt=0)
    """Seconds after which another instance takes over the requests of a dead one."""
    prediction_keep_s: int = Field(3600, ge=60)
    """How long to keep a prediction and its result after its end."""
    webhook_secrets: str = ""
    """`whsec_…`, comma-separated, the same as for the function that delivers webhooks.

    Each tenant's secrets are derived from them. Callers get the secret derived from the first.
    """
    webhooks_private: bool = False
    """True if webhooks may use private addresses and http, the same as for the function.

    For local use.
    """
    fetch_hosts: str = "*"
    """Hosts from which inputs named by https URL are fetched: HOST or HOST:PORT, comma-separated.

    `*.example.com` matches any host below it, `*` any public host. Without a port: 443. Empty:
    none.
    """
    fetch_networks: str = ""
    """Networks that are not public but from which inputs may be fetched, comma-separated."""
    fetch_ca: str = ""
    """Path of certificate authorities (PEM) to trust for fetching, in addition to the machine's."""
    fetch_limit_s: float = Field(20.0, gt=0, le=300)
    """Time limit for fetching the inputs of one request.

    It is accepted only after they are loaded, and clients hang up after 30 s.
    """
    answers_max_bytes: int = Field(BUDGET_BYTES, ge=1024 * 1024)
    """Memory in Redis for answers stored for Idempotency-Keys.

    Above it, the oldest answers of the largest tenant are dropped.
    """
    predictions_max_bytes: int = Field(BUDGET_BYTES, ge=1024 * 1024)
    """Memory in Redis for predictions.

    Above it, the oldest finished predictions of the largest tenant are dropped. A new prediction
    without room gets 429.
    """
    usage_query_max_bytes: int = Field(20 * 1024**3, ge=1024**2)
    """Maximum bytes that a usage query may read in BigQuery. Larger queries are rejected."""
    memory_cache_bytes: int = Field(64 * 1024 * 1024, ge=0)
    request_max_bytes: int = Field(32 * 1024 * 1024, ge=1)
    files_max_bytes: int = Field(2 * 1024**3, ge=1024 * 1024)
    """Maximum bytes stored per tenant, unless its plan sets another number: uploads, batch outputs,
    `data:` images of predictions, files fetched by URL, and files returned by custom classes in
    predictions.

    Above it, uploads, fetches and such predictions are rejected.
    """
    batch_items_in_flight: int = Field(128, ge=1)
    """Texts and images of batches that a runner has in flight at the same time."""
    bodies_max_bytes: int = Field(256 * 1024 * 1024, ge=1)
    """Memory for the bodies of all open requests. Above it, bodies of more than 64 KiB get 429."""
    head_timeout_s: float = Field(20.0, gt=0)
    """Time limit for receiving a request's URL and headers, from the first byte or from the opening
    of the connection.

    Then the connection is closed, with a 408 if the request had begun.
    """
    max_connections: int = Field(4096, ge=1)
    """Maximum number of client connections, within the process's limit on open files.

    Above it, an idle connection is closed. If none is idle, the new one is rejected (429).
    """
    picture_processes: int = Field(2, ge=1, le=64)
    """Processes that decode and encode images for one tenant, one image each at a time.

    All tenants together have one more, so that no tenant can use all of them. They start with the
    first image.
    """
    picture_budget_bytes: int = Field(256 * 1024 * 1024, ge=1)
    """Memory for decoding images at the same time.

    A larger image (a 25-megapixel WebP takes 400 MB) is decoded alone. In addition, each process
    may decode an image that takes a quarter of it.
    """

    @field_validator("tls_key")
    @classmethod
    def _is_one_of_two(cls, value: str, info: ValidationInfo) -> str:
        if bool(value) != bool(info.data.get("tls_cert")):
            raise ValueError("PENSTOCK_TLS_CERT and PENSTOCK_TLS_KEY must be set together")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: str) -> str:
        for origin in [] if value.strip() in ("", "*") else value.split(","):
            if not _ORIGIN.fullmatch(origin.strip()):
                raise ValueError(
                    f"must be origins such as https://app.example.com, got {origin.strip()!r}"
                )
        return value

    @field_validator("fetch_hosts")
    @classmethod
    def _are_hosts(cls, value: str) -> str:
        for host in filter(None, map(str.strip, value.split(","))):
            if not _HOST.fullmatch(host):
                raise ValueError(f"must be HOST or HOST:PORT such as *.example.com, got {host!r}")
        return value

    @field_validator("fetch_networks")
    @classmethod
    def _are_plain_networks(cls, value: str) -> str:
        for network in filter(None, map(str.strip, value.split(","))):
            ip_network(network)
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, value: str) -> str:
        for proxy in [] if value.strip() in ("", "*") else value.split(","):
            # uvicorn treats a value that is not an address as a name, and then trusts no proxy.
            ip_network(proxy.strip())
        return value


class ModelSettings(Settings):
    """Settings for loading models, in model processes and in commands that try a model."""

    models_dir: Path = Path("var/models")
    """Folder of weights from the Hub or a bucket."""
    weights_dir: Path | None = None
    """Mounted folder of weights copied by `penstock weights prefetch`. None: not used."""
    kernels_dir: Path | None = None
    """Folder in which compiled kernels outlive a worker, for example a mounted bucket, by model,
    GPU, driver and torch.

    None: they are kept only on the worker's disk.
    """


class ClassSettings(ModelSettings):
    """Settings for running custom classes, in workers, `penstock models` and `predict`."""

    environments_dir: Path = Path("var/environments")
    """Folder of virtual environments for classes that need packages, named by a digest of the
    packages.
    """
    class_variables: str = ""
    """Names of this process's variables to pass to all classes, comma-separated.

    Empty: only PATH, the locale and GPU variables. Useful for proxies and certificates:
    HTTPS_PROXY,NO_PROXY,SSL_CERT_FILE. A password in the proxy's URL is then known to the classes.
    """
    startup_s: float = Field(0.0, ge=0, le=MAX_STARTUP_S)
    """Time limit for a model process to become ready, replacing the sum of its models' `startup_s`.
    0: use the catalog.
    """

    @field_validator("class_variables")
    @classmethod
    def _are_names(cls, value: str) -> str:
        for name in filter(None, map(str.strip, value.split(","))):
            check_name(name)
        return value

    @property
    def class_variable_names(self) -> list[str]:
        """The names in `class_variables`."""
        return list(filter(None, map(str.strip, self.class_variables.split(","))))


class WorkerSettings(ClassSettings):
    """Settings of a worker.

    `model` names the catalog entry that it serves, or several, comma-separated.
    """

    model: str
    health_host: str = "127.0.0.1"
    health_port: int = Field(8081, ge=0, le=65535)
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:N`, or `auto`: cuda if there is a GPU."""
    artifacts_dir: Path = Path("var/artifacts")
    """Folder with optimized artifacts and the backends chosen on this machine."""
    processes: int = Field(0, ge=0)
    """Number of model processes. 0: one (a text model with a whole CPU), otherwise one per GPU or
    per core (at most 4).
    """
    threads: int = Field(0, ge=0)
    """Threads per model process on a CPU. 0: one per core (a text model with a whole CPU, or
    embeddings with ONNX Runtime), a share of the cores (embeddings with torch), otherwise 1.
    """
    memory_fraction: float = Field(1.0, gt=0, le=1)
    """Fraction of GPU memory that each model process may use."""
    memory_budget_bytes: int = Field(0, ge=0)
    """Memory for the models of each model process.

    Above it, the least recently used one is dropped. 0: limited only by the device.
    """
    max_outstanding_bytes: int = Field(64 * 1024 * 1024, ge=1)
    ack_deadline_s: int = Field(10, ge=10, le=600)
    """Seconds until the jobs of a dead worker go to another one. The service's minimum is 10.

    Jobs that it held for longer than a second are redelivered after 0.7 of that.
    """
    memory_cache_bytes: int = Field(64 * 1024 * 1024, ge=0)
    drain_s: float = Field(20.0, gt=0)
    spot: bool | None = None
    """True if the worker runs on a spot node, for rows. None: not known."""

    @property
    def model_names(self) -> list[str]:
        """The names in `model`, without duplicates."""
        return list(dict.fromkeys(name.strip() for name in self.model.split(",")))


class ReportSettings(InvoiceSettings):
    """Settings of the process that creates scheduled reports."""

    billing_tz: str = "UTC"
    """Time zone of days and months in scheduled reports and their invoices, by IANA name.

    After changing it, add up earlier days again.
    """

    @field_validator("billing_tz")
    @classmethod
    def _is_zone(cls, name: str) -> str:
        if name not in time_zones():
            raise ValueError(f"must be a time zone such as Europe/Berlin, got {name[:40]!r}")
        return name


@cache
def time_zones() -> frozenset[str]:
    """Returns the time zone names that BigQuery also recognizes.

    ZoneInfo also accepts names that exist only on this machine, such as `posix/UTC` and
    `localtime`.
    """
    return frozenset(available_timezones()) - {"Factory", "localtime"}


Kind = TypeVar("Kind", bound=Settings)


def list_given_settings() -> dict[str, str]:
    """Returns the environment variables that are settings."""
    return {name: value for name, value in os.environ.items() if name.startswith("PENSTOCK_")}


def environment_with(settings: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a child process: this one's, with only `settings` as settings."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")
    } | dict(settings)


def read_settings(kind: type[Kind], **overrides: object) -> Kind:
    """Returns the settings in the environment. `overrides` take precedence.

    Raises:
        ConfigurationError: a variable is missing or invalid. The message has its name and the
            reason.
    """
    try:
        return kind(**overrides)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        variable = name if name.isupper() else f"PENSTOCK_{name.upper()}"
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigurationError(f"{variable}: {reason}", field=name) from error
