"""The fields of a site file, which describes a cluster off Google. They are checked first."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit
from zoneinfo import available_timezones

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

Image = Annotated[str, Field(pattern=r"^[^@\s]+(@sha256:[0-9a-f]{64}|:[A-Za-z0-9._-]+)$")]
"""An image by digest or tag."""
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
"""The name of an object in Kubernetes."""
Size = Annotated[str, Field(pattern=r"^[1-9][0-9]*(Mi|Gi|Ti)$")]
Cores = Annotated[str, Field(pattern=r"^([1-9][0-9]*m?|[0-9]+\.[0-9]+)$")]
LabelName = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]*$")]
LabelValue = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/-]+$")]
_OCTET = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
_IPV4 = rf"({_OCTET}\.){{3}}{_OCTET}(/(3[0-2]|[12]?[0-9]))?"
_IPV6 = "[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(/[0-9]{1,3})?"
_NETWORK = f"^({_IPV4}|{_IPV6})$"
"""A regular expression can't see that no bit of the host is set. Kubernetes takes those too."""

BUCKET = r"^(gs|s3)://[a-z0-9][a-z0-9._-]*[a-z0-9](/[A-Za-z0-9._/-]*)?$"


def _is_network(value: str) -> str:
    ip_network(value)
    return value


def _is_zone(value: str) -> str:
    if value not in available_timezones():
        raise ValueError(f"{value!r} is not a time zone")
    return value


Network = Annotated[
    str, AfterValidator(_is_network), WithJsonSchema({"type": "string", "pattern": _NETWORK})
]
Zone = Annotated[
    str,
    AfterValidator(_is_zone),
    WithJsonSchema({"type": "string", "enum": sorted(available_timezones())}),
]


def _with(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has this property, which fits that schema."""
    return {"type": "object", "properties": {name: schema}, "required": [name]}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Images(_Part):
    """The images, which infra/docker builds. Redis comes from elsewhere."""

    api: Image
    functions: Image
    worker: Image
    servers: Image
    redis: Image


class SiteVolume(_Part):
    """A volume that the cluster provides."""

    size: Size
    storage_class: Name | None = None
    """None: the cluster's default."""


class EmbeddedBroker(_Part):
    """Our own Pub/Sub, one pod with a volume."""

    kind: Literal["embedded"]
    volume: SiteVolume = SiteVolume(size="20Gi")
    fsync: bool = True
    """True if it waits for the disk, so that a power cut loses nothing."""


class GoogleBroker(_Part):
    """Google's Pub/Sub, whose topics and functions Terraform makes."""

    # What `_has_a_pool_to_begin` asks, as a schema.
    model_config = ConfigDict(
        json_schema_extra={
            "if": _with("inbox_first", {"minimum": 1}),
            "then": _with("inbox_pool", {"minimum": 1}),
        }
    )
    kind: Literal["google"]
    inbox_pool: int = Field(0, ge=0, le=1000)
    """Reply inboxes that Terraform made for this cluster. 0: each API makes its own, which its
    account has to be allowed to.
    """
    inbox_first: int = Field(0, ge=0)
    """Number of the first of them."""
    inbox_slots: int = Field(8, ge=1, le=200)
    """Reply slots that the API uses in each inbox. Terraform's `inboxes.slots` is at least this."""

    @model_validator(mode="after")
    def _has_a_pool_to_begin(self) -> GoogleBroker:
        if self.inbox_first and not self.inbox_pool:
            raise ValueError("inbox_first: is for a pool, and inbox_pool is 0")
        return self


class RabbitBroker(_Part):
    """A RabbitMQ that is there already."""

    kind: Literal["rabbitmq"]
    secret: Name
    """A Secret with the variable PENSTOCK_BROKER, because the URL has a password."""
    networks: tuple[Network, ...] = Field(min_length=1)
    """Its addresses, for the network policies."""
    port: int = Field(5672, ge=1, le=65535)


class EmbeddedRows(_Part):
    """Our own BigQuery, one pod with a volume."""

    kind: Literal["embedded"]
    volume: SiteVolume = SiteVolume(size="50Gi")
    archive: bool = False
    """True if rows go to the object store first, into Parquet files below `usage/`. Then the volume
    can be lost.
    """


class GoogleRows(_Part):
    """Google's BigQuery."""

    kind: Literal["google"]


class EmbeddedRedis(_Part):
    """One pod with a volume, which appends every write to a file."""

    kind: Literal["embedded"]
    volume: SiteVolume = SiteVolume(size="8Gi")
    memory: Size = "1Gi"

    @property
    def memory_mib(self) -> int:
        """Its memory in MiB."""
        return int(self.memory[:-2]) * {"Mi": 1, "Gi": 1024, "Ti": 1024**2}[self.memory[-2:]]


class GivenRedis(_Part):
    """A Redis that is there already."""

    kind: Literal["given"]
    url: str = Field(pattern=r"^rediss?://[^\s@/]+(/[0-9]+)?$")
    """Without a password, which would be in a ConfigMap."""
    networks: tuple[Network, ...] = Field(min_length=1)
    """Its addresses, for the network policies."""

    @property
    def port(self) -> int:
        """The address that it listens on."""
        return urlsplit(self.url).port or 6379


class VolumeObjects(_Part):
    """A folder on a volume that all pods share."""

    kind: Literal["volume"]
    volume: SiteVolume
    """A volume of a storage class with ReadWriteMany, such as NFS or CephFS."""


class BucketObjects(_Part):
    """A bucket."""

    kind: Literal["bucket"]
    url: str = Field(pattern=BUCKET)
    secret: Name | None = None
    """A Secret with environment variables for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, and
    AWS_ENDPOINT and AWS_REGION if they differ from Amazon's.
    """
    networks: tuple[Network, ...] = ()
    """Private addresses of the store, for the network policies."""
    port: int = Field(443, ge=1, le=65535)


class SiteApi(_Part):
    """The API's pods."""

    replicas: int = Field(2, ge=1, le=100)
    cpu: Cores = "1"
    memory: Size = "1Gi"


class Ingress(_Part):
    """The way in, which ends TLS."""

    host: Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z]{2,}$")]
    class_name: Name
    tls_secret: Name
    """Has the certificate of `host`. cert-manager writes it where `annotations` say so."""
    namespace: Name
    """Namespace of the controller, whose pods may reach the API."""
    networks: tuple[Network, ...] = Field(min_length=1)
    """Addresses of the controller's pods, whose X-Forwarded-Proto the API trusts."""
    annotations: dict[str, str] = {}


class Autoscaling(_Part):
    """Autoscaling of workers by load. The cluster has KEDA 2.17 or later."""

    prometheus: str = Field(pattern=r"^https?://[^\s@/?#]+(/[^\s/?#]+)*$")
    """The address of its queries, which need no credentials."""
    labels: dict[LabelName, LabelValue] | None = None
    """Labels that all series of this site have there, and those of no other. None: `namespace`."""


class Google(_Part):
    """The pods' access to Google's services."""

    project: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{4,28}[a-z0-9]$")]
    credentials_secret: Name
    """Has `credentials.json`: an external account (workload identity federation), or a key."""


class SelfHostedSite(_Part):
    """A whole deployment off Google, in one namespace."""

    # What `_can_reach_google` asks, as a schema.
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
    """Has `keys.json`, the directory of API keys (docs/how-to/keys.md)."""
    signing_secret: Name = "penstock-signing"
    """Has PENSTOCK_SECRET and PENSTOCK_WEBHOOK_SECRETS, as variables."""
    api: SiteApi = SiteApi()
    billing_tz: Zone = "UTC"
    """The time zone in which days of scheduled reports and invoices begin."""
    batches: bool = True
    """True if a batch runner runs."""
    ingress: Ingress | None = None
    """None: no Ingress is made, and the Service `api` is reached in another way."""
    google: Google | None = None
    time_slicing: bool = False
    """True if nodes with GPUs have the label `nvidia.com/device-plugin.config`, which says how many
    workers share one. Otherwise workers go to any node with a GPU.
    """
    autoscaling: Autoscaling | None = None
    """None: each model has `replicas.min` workers, at least one."""

    @model_validator(mode="after")
    def _can_reach_google(self) -> SelfHostedSite:
        if self.google is None and self.uses_google:
            raise ValueError("google: is needed, because broker, rows or objects are Google's")
        return self

    @property
    def has_servers(self) -> bool:
        """Returns whether topics or tables are created on servers that are not Google's."""
        return self.broker.kind == "rabbitmq" or "embedded" in (self.broker.kind, self.rows.kind)

    @property
    def uses_google(self) -> bool:
        """Returns whether any server is Google's."""
        parts = self.broker.kind, self.rows.kind
        in_bucket = isinstance(self.objects, BucketObjects) and self.objects.url.startswith("gs:")
        return in_bucket or "google" in parts


KINDS: dict[str, dict[str, type[BaseModel]]] = {
    "broker": {"embedded": EmbeddedBroker, "google": GoogleBroker, "rabbitmq": RabbitBroker},
    "rows": {"embedded": EmbeddedRows, "google": GoogleRows},
    "redis": {"embedded": EmbeddedRedis, "given": GivenRedis},
    "objects": {"volume": VolumeObjects, "bucket": BucketObjects},
}
"""The models of the parts whose `kind` is chosen."""


def site_schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of a site file. It accepts what `read_site` does.

    Alternatives are conditions on `kind`, so that a validator names the wrong field of the one that
    was chosen, and not that none of them fits.
    """
    schema: dict[str, Any] = _conditional(SelfHostedSite.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def _conditional(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_conditional(one) for one in schema]
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
        # Pydantic refuses other names, and leaves that out of its schema.
        schema = schema | {"additionalProperties": False}
    optional = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(optional) == 1 and len(schema["anyOf"]) == 2:
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        return rest | {"if": {"not": {"type": "null"}}, "then": _conditional(optional[0])}
    return {key: _conditional(value) for key, value in schema.items()}


def read_site(path: Path) -> SelfHostedSite:
    """The site that a file describes.

    Raises:
        ConfigurationError: it can't be read, or a field is wrong. The message names it and why.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
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
