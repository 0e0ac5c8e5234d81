"""Fields of a site file, which describes a cluster outside Google, and their validation."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from shared.errors import ConfigurationError
from shared.settings import time_zones

Image = Annotated[str, Field(pattern=r"^[^@\s]+(@sha256:[0-9a-f]{64}|:[A-Za-z0-9._-]+)$")]
"""An image, specified by digest or tag."""
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
"""The name of a Kubernetes object."""
Size = Annotated[str, Field(pattern=r"^[1-9][0-9]*(Mi|Gi|Ti)$")]
Cores = Annotated[str, Field(pattern=r"^([1-9][0-9]*m?|[0-9]+\.[0-9]+)$")]
LabelName = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]*$")]
LabelValue = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/-]+$")]
_OCTET = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
_IPV4 = rf"({_OCTET}\.){{3}}{_OCTET}(/(3[0-2]|[12]?[0-9]))?"
_IPV6 = "[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(/[0-9]{1,3})?"
_NETWORK = f"^({_IPV4}|{_IPV6})$"
"""A network in CIDR notation. A regular expression can't check that all host bits are 0.

Kubernetes accepts such addresses too.
"""

_PORT = "(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5]?[0-9]{1,4})"
REDIS = rf"^rediss?://(\[[0-9A-Fa-f:.]+\]|[^\s@/:\[\]?#]+)(:{_PORT})?(/[0-9]+)?$"
BUCKET = r"^(gs|s3)://[a-z0-9][a-z0-9._-]*[a-z0-9](/[A-Za-z0-9._/-]*)?$"


def _is_network(value: str) -> str:
    ip_network(value)
    return value


def _is_zone(value: str) -> str:
    if value not in time_zones():
        raise ValueError(f"{value!r} is not a time zone")
    return value


Network = Annotated[
    str, AfterValidator(_is_network), WithJsonSchema({"type": "string", "pattern": _NETWORK})
]
Zone = Annotated[
    str,
    AfterValidator(_is_zone),
    WithJsonSchema({"type": "string", "enum": sorted(time_zones())}),
]


def _with(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Returns an object schema in which this property matches `schema`."""
    return {"type": "object", "properties": {name: schema}, "required": [name]}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Images(_Part):
    """Our images, built from infra/docker. The Redis image comes from elsewhere."""

    api: Image
    functions: Image
    worker: Image
    servers: Image
    redis: Image


class SiteVolume(_Part):
    """A volume provided by the cluster."""

    size: Size
    storage_class: Name | None = None
    """None means the cluster's default."""


class EmbeddedBroker(_Part):
    """Our own Pub/Sub, one pod with a volume."""

    kind: Literal["embedded"]
    volume: SiteVolume = SiteVolume(size="20Gi")
    fsync: bool = True
    """True if it waits for disk writes, so that a power failure loses nothing."""


class GoogleBroker(_Part):
    """Google's Pub/Sub, with topics and functions created by Terraform."""

    # Expresses the `_has_a_pool_to_begin` check as a schema.
    model_config = ConfigDict(
        json_schema_extra={
            "if": _with("inbox_first", {"minimum": 1}),
            "then": _with("inbox_pool", {"minimum": 1}),
        }
    )
    kind: Literal["google"]
    inbox_pool: int = Field(0, ge=0, le=1000)
    """Number of reply inboxes that Terraform created for this cluster. If 0, each API instance
    creates its own inbox, so its account needs permission to do so.
    """
    inbox_first: int = Field(0, ge=0)
    """The first inbox's number."""
    inbox_slots: int = Field(8, ge=1, le=200)
    """Reply slots that the API uses in each inbox.

    Terraform's `inboxes.slots` must be at least this.
    """

    @model_validator(mode="after")
    def _has_a_pool_to_begin(self) -> GoogleBroker:
        if self.inbox_first and not self.inbox_pool:
            raise ValueError("inbox_first: requires inbox_pool, which is 0")
        return self


class RabbitBroker(_Part):
    """An existing RabbitMQ."""

    kind: Literal["rabbitmq"]
    secret: Name
    """A Secret containing the variable PENSTOCK_BROKER.

    It is a secret because the URL contains a password.
    """
    networks: tuple[Network, ...] = Field(min_length=1)
    """The server's addresses, for the network policies."""
    port: int = Field(5672, ge=1, le=65535)


class EmbeddedRows(_Part):
    """Our own BigQuery, one pod with a volume."""

    kind: Literal["embedded"]
    volume: SiteVolume = SiteVolume(size="50Gi")
    archive: bool = False
    """True if rows are first written to the object store, as Parquet files under `usage/`.

    In that case, losing the volume does not lose any rows.
    """


class GoogleRows(_Part):
    """Google's BigQuery."""

    kind: Literal["google"]


class EmbeddedRedis(_Part):
    """One pod with a volume; every write is appended to a file."""

    kind: Literal["embedded"]
    volume: SiteVolume = SiteVolume(size="8Gi")
    memory: Size = "1Gi"

    @property
    def memory_mib(self) -> int:
        return int(self.memory[:-2]) * {"Mi": 1, "Gi": 1024, "Ti": 1024**2}[self.memory[-2:]]


class GivenRedis(_Part):
    """An existing Redis."""

    kind: Literal["given"]
    url: str = Field(pattern=REDIS)
    """URL without a password, because the URL is stored in a ConfigMap."""
    networks: tuple[Network, ...] = Field(min_length=1)
    """The server's addresses, for the network policies."""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 6379


class VolumeObjects(_Part):
    """A folder on a volume that all pods share."""

    kind: Literal["volume"]
    volume: SiteVolume
    """A volume of a storage class with ReadWriteMany, such as NFS or CephFS."""


class BucketObjects(_Part):
    """An existing bucket."""

    kind: Literal["bucket"]
    url: str = Field(pattern=BUCKET)
    secret: Name | None = None
    """A Secret with environment variables for S3:

    AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; also AWS_ENDPOINT and AWS_REGION if the store is
    not Amazon's.
    """
    networks: tuple[Network, ...] = ()
    """The store's private addresses, for the network policies."""
    port: int = Field(443, ge=1, le=65535)


class SiteApi(_Part):
    """The API's pods."""

    replicas: int = Field(2, ge=1, le=100)
    cpu: Cores = "1"
    memory: Size = "1Gi"


class Invoices(_Part):
    """Invoice terms, for the API and the functions."""

    seller: str = ""
    """Name and address, one per line. Not shown if empty."""
    tax_name: str = "Tax"
    tax_percent: float = Field(0, ge=0, le=100)
    """Tax added to the total. If 0, invoices have no tax line."""


class Ingress(_Part):
    """The ingress, which terminates TLS."""

    host: Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z]{2,}$")]
    class_name: Name
    tls_secret: Name
    """A Secret with the certificate for `host`. cert-manager writes the Secret if `annotations`
    request it.
    """
    namespace: Name
    """Namespace of the controller, whose pods are allowed to reach the API."""
    networks: tuple[Network, ...] = Field(min_length=1)
    """Addresses of the controller's pods, whose X-Forwarded-Proto the API trusts."""
    annotations: dict[str, str] = {}


class Autoscaling(_Part):
    """Load-based worker autoscaling. Requires KEDA 2.17 or later in the cluster."""

    prometheus: str = Field(pattern=r"^https?://[^\s@/?#]+(/[^\s/?#]+)*$")
    """URL for its queries, which need no credentials."""
    labels: dict[LabelName, LabelValue] | None = None
    """Labels that select the deployment's series. None means its `namespace`."""


class Google(_Part):
    """The pods' access to Google's services."""

    project: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{4,28}[a-z0-9]$")]
    credentials_secret: Name
    """Contains `credentials.json`: an external account (workload identity federation) or a key."""


class SelfHostedSite(_Part):
    """A complete deployment outside Google, in one namespace."""

    # Expresses the `_can_reach_google` check as a schema.
    model_config = ConfigDict(
        json_schema_extra={
            "if": {
                "anyOf": [
                    _with("broker", _with("kind", {"const": "google"})),
                    _with("rows", _with("kind", {"const": "google"})),
                    _with("objects", _with("url", {"pattern": "^gs:"})),
                ]
            },
            "then": {"required": ["google"], "properties": {"google": {"type": "object"}}},
        }
    )
    namespace: Name = "penstock"
    region: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")] = "local"
    """Region name in rows, traces and status."""
    images: Images
    broker: Annotated[EmbeddedBroker | GoogleBroker | RabbitBroker, Field(discriminator="kind")]
    rows: Annotated[EmbeddedRows | GoogleRows, Field(discriminator="kind")]
    redis: Annotated[EmbeddedRedis | GivenRedis, Field(discriminator="kind")]
    objects: Annotated[VolumeObjects | BucketObjects, Field(discriminator="kind")]
    dataset: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")] = "penstock"
    keys_secret: Name = "penstock-keys"
    """A Secret with `keys.json`, the directory of API keys (docs/how-to/keys.md)."""
    signing_secret: Name = "penstock-signing"
    """A Secret with PENSTOCK_SECRET and PENSTOCK_WEBHOOK_SECRETS, as variables."""
    api: SiteApi = SiteApi()
    billing_tz: Zone = "UTC"
    """Time zone that determines when days in scheduled reports and invoices begin."""
    invoices: Invoices = Invoices()
    batches: bool = True
    """True to run a batch runner."""
    ingress: Ingress | None = None
    """If None, no Ingress is created, and the Service `api` is reached some other way."""
    google: Google | None = None
    time_slicing: bool = False
    """True if GPU nodes have the label `nvidia.com/device-plugin.config`, which sets how many
    workers share a GPU. Otherwise, workers may run on any node with a GPU.
    """
    autoscaling: Autoscaling | None = None
    """If None, each model has `replicas.min` workers, but at least one."""

    @model_validator(mode="after")
    def _can_reach_google(self) -> SelfHostedSite:
        if self.google is None and self.uses_google:
            raise ValueError("google: is required because broker, rows or objects use Google")
        return self

    @property
    def has_servers(self) -> bool:
        return self.broker.kind == "rabbitmq" or "embedded" in (self.broker.kind, self.rows.kind)

    @property
    def uses_google(self) -> bool:
        parts = self.broker.kind, self.rows.kind
        in_bucket = isinstance(self.objects, BucketObjects) and self.objects.url.startswith("gs:")
        return in_bucket or "google" in parts


KINDS: dict[str, dict[str, type[BaseModel]]] = {
    "broker": {"embedded": EmbeddedBroker, "google": GoogleBroker, "rabbitmq": RabbitBroker},
    "rows": {"embedded": EmbeddedRows, "google": GoogleRows},
    "redis": {"embedded": EmbeddedRedis, "given": GivenRedis},
    "objects": {"volume": VolumeObjects, "bucket": BucketObjects},
}
"""The models for the parts selected by `kind`."""


def site_schema() -> dict[str, Any]:
    """Returns the JSON schema (2020-12) for a site file. It accepts the same files as `read_site`.

    Alternatives are expressed as conditions on `kind`, so a validator names the invalid field in
    the selected alternative instead of reporting that no alternative matches.
    """
    schema: dict[str, Any] = _conditional(SelfHostedSite.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def _conditional(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_conditional(element) for element in schema]
    if not isinstance(schema, dict):
        return schema
    if "discriminator" in schema:
        kinds = schema["discriminator"]["mapping"]
        chosen = _with("kind", {"enum": sorted(kinds)})
        rules = [
            {"if": _with("kind", {"const": kind}), "then": {"$ref": target}}
            for kind, target in kinds.items()
        ]
        return chosen | {"allOf": rules}
    if "patternProperties" in schema:
        # Pydantic rejects unknown names, but its schema doesn't show that.
        schema = schema | {"additionalProperties": False}
    optional = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    if len(optional) == 1 and len(schema["anyOf"]) == 2:
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        return rest | {"if": {"not": {"type": "null"}}, "then": _conditional(optional[0])}
    return {key: _conditional(value) for key, value in schema.items()}


def read_site(path: Path) -> SelfHostedSite:
    """Reads the site described by a file.

    Raises:
        ConfigurationError: the file can't be read, or a field is invalid. The message names the
        field and the reason.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    try:
        return SelfHostedSite.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigurationError(
            f"{path}: {f'{where}: ' if where else ''}{reason}", field=where
        ) from error
