"""The inputs of an overlay besides the catalog: places of workers, their endpoints, GPU types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shared.catalog_entry import Gpu, GpuTypeName
from shared.errors import ConfigurationError

GPU_TYPES_FILE = Path(__file__).parent / "gpus.yaml"


class GpuType(BaseModel):
    """A GPU type: its node label, its machine, where it exists, and what workers get of a node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    accelerator: str
    machine_type: str
    vcpus: int = Field(gt=0)
    cpu: int = Field(gt=0)
    memory_gib: int = Field(gt=0)
    gpu_memory_gib: int = Field(gt=0)
    disk_type: Literal["pd-balanced", "hyperdisk-balanced"]
    disk_gb: int = Field(gt=0)
    ephemeral_gib: int = Field(gt=0)
    on_demand: bool = True
    """True if it is sold without spot, flex-start or a reservation."""
    quota: str
    zones: dict[str, tuple[str, ...]]
    """The letters of the zones that have it, by region."""

    def zones_in(self, region: str, among: Sequence[str] | None = None) -> tuple[str, ...]:
        """The zones of `region` that have it, only those in `among` if it is set."""
        names = (f"{region}-{letter}" for letter in self.zones.get(region, ()))
        return tuple(name for name in names if among is None or name in among)


class GpuReservation(BaseModel):
    """A specific reservation of machines in one zone, perhaps shared by another project."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    zone: str
    project: str | None = None


class OwnPrometheus(BaseModel):
    """The Prometheus of a cluster outside Google, which KEDA asks without credentials."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    labels: dict[str, str]
    """Labels that all series of this deployment have there, and those of no other."""
    has_rabbitmq: bool
    """True if the broker is RabbitMQ, whose queues have a metric."""


class Deployment(BaseModel):
    """The workers of one region, or of a cluster outside Google.

    Terraform's output `deployments` (or `outside`) says most. Everything
    up to `rows_url` is what API and workers have to agree on, so it comes from one place.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    project: str
    region: str
    namespace: str
    dataset: str
    objects_url: str
    redis_url: str
    records_url: str
    rows_url: str = ""
    """The bucket that rows are put into. Empty: they go straight to BigQuery."""
    redis_cidrs: tuple[str, ...] = Field(min_length=1)
    """Addresses of both, for the network policy, to which none would mean all."""
    audience: str = Field("", pattern=r"^(//iam\.googleapis\.com/\S+)?$")
    """The audience of the workers' tokens. Empty on GKE, which needs no tokens."""
    is_self_hosted: bool = False
    """True if the whole deployment is in a cluster outside Google (self_hosted.py)."""
    time_slicing: bool = False
    """Nodes outside Google have the label that says how many workers share their GPUs."""
    settings: dict[str, str] = {}
    """Further variables of the workers."""
    models: tuple[str, ...] | None = None
    """The models of the catalog that run there. None: all."""
    spot: bool
    overflow: GpuTypeName | None
    """GPU type that takes over where another is out of stock."""
    reservations: dict[GpuTypeName, GpuReservation] = {}
    """A reservation of a GPU type. It is used up first."""
    weights_bucket: str | None = None
    """The bucket that `penstock weights prefetch` filled. None: workers download from the hub."""
    hub_token: str | None = None
    """The secret with a token for gated models of the hub."""
    zones: tuple[str, ...] | None = None
    """The zones that GPU nodes may be in. None: all of the region that have the GPU."""
    compute_classes: bool
    """Nodes come from ComputeClasses instead of the pools that Terraform makes."""
    traces: dict[str, str] = {}
    """OpenTelemetry's variables of the workers. Empty: they make no spans."""
    image: str = Field(pattern=r"^[^@\s]+(@sha256:[0-9a-f]{64}|:[A-Za-z0-9._-]+)$")
    """The worker image, by digest or tag."""
    autoscaler: Literal["keda", "hpa"] = "keda"
    prometheus: OwnPrometheus | None = None
    """The source of the autoscaler's metrics. None: Managed Prometheus on GKE, and no autoscaler
    elsewhere.
    """
    buffer: int = Field(1, ge=0)
    """Places kept warm for each class of GPU nodes."""
    capacity_buffers: bool = False
    """Keep them with CapacityBuffer (the cluster must have it) instead of balloons."""

    @property
    def is_outside(self) -> bool:
        """True if the cluster is outside Google, without GKE's nodes, metrics and identities."""
        return bool(self.audience) or self.is_self_hosted

    @property
    def is_scaled(self) -> bool:
        """True if an autoscaler sets the number of workers."""
        return not self.is_outside or self.prometheus is not None

    @property
    def metrics_url(self) -> str:
        """The address of Prometheus' queries; by default Managed Prometheus.

        KEDA's scaler for Pub/Sub is deprecated, as it uses Monitoring's old query language:
        https://keda.sh/docs/2.18/scalers/gcp-pub-sub/
        """
        if self.prometheus is not None:
            return self.prometheus.url
        return f"https://monitoring.googleapis.com/v1/projects/{self.project}/location/global/prometheus"


def read_deployment(path: Path, region: str, **options: object) -> Deployment:
    """The deployment of `region` from `terraform output -json deployments`, with `options`.

    Raises:
        ConfigurationError: the file can't be read, has no such region, or something is missing or
            wrong.
    """
    try:
        regions = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if not isinstance(regions, dict) or region not in regions:
        known = ", ".join(regions) if isinstance(regions, dict) else "none"
        raise ConfigurationError(f"{path}: no region {region!r}; it has: {known}", field="region")
    try:
        return Deployment.model_validate(regions[region] | options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{path}: {where}: {first['msg']}", field=where) from error


@cache
def read_gpu_types() -> dict[str, GpuType]:
    """The GPU types by the names that models.yaml uses."""
    return TypeAdapter(dict[str, GpuType]).validate_python(
        yaml.safe_load(GPU_TYPES_FILE.read_text(encoding="utf-8"))
    )


def zones_with(
    type_: str, region: str, gpu_types: dict[str, GpuType], among: Sequence[str] | None = None
) -> tuple[str, ...]:
    """The zones of a region whose nodes can have this GPU.

    Raises:
        ConfigurationError: none was found. Terraform refuses the same.
    """
    if zones := gpu_types[type_].zones_in(region, among):
        return zones
    left_out = "" if among is None else f", of {', '.join(among)}"
    raise ConfigurationError(
        f"regions.{region}: no zone has {type_}{left_out} (infra/kubernetes/gpus.yaml)",
        field=f"regions.{region}",
    )


def gpu_class(gpu: Gpu) -> str:
    """The class of nodes that offers this GPU so. Terraform labels its pools with it."""
    return f"{gpu.type}-x{gpu.share}" + ("-flex" if gpu.provisioning == "flex-start" else "")
