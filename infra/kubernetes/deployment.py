"""An overlay's inputs apart from the catalog: where workers run, endpoints, and GPU types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shared.errors import ConfigurationError
from shared.models.entry import Gpu, GpuTypeName

GPU_TYPES_FILE = Path(__file__).parent / "gpus.yaml"


class Machine(BaseModel):
    """A machine type with GPUs, and the node resources for workers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    machine_type: str
    vcpus: int = Field(gt=0)
    cpu: int = Field(gt=0)
    memory_gib: int = Field(gt=0)
    disk_gb: int = Field(gt=0)
    ephemeral_gib: int = Field(gt=0)


class GpuType(Machine):
    """A GPU type: its node label and zones, and its machine type with one GPU."""

    accelerator: str
    gpu_memory_gib: int = Field(gt=0)
    disk_type: Literal["pd-balanced", "hyperdisk-balanced"]
    on_demand: bool = True
    """True if it is available without spot, flex-start, or a reservation."""
    quota: str
    larger: dict[int, Machine] = {}
    """Machines with more GPUs, keyed by their number."""
    larger_priced_as: str | None = None
    """The machine type with one GPU whose price, times that number, is the price of a larger one.

    None means the type's own machine type.
    """
    zones: dict[str, tuple[str, ...]]
    """Letters of the zones that have this GPU, keyed by region."""

    def machine(self, gpus: int) -> Machine:
        """Returns the machine type with this many GPUs."""
        return self if gpus == 1 else self.larger[gpus]

    def choose_price(self, gpus: int) -> str:
        """Returns the machine type whose price, times `gpus`, is the machine's price."""
        return self.machine_type if gpus == 1 else self.larger_priced_as or self.machine_type

    def zones_in(self, region: str, among: Sequence[str] | None = None) -> tuple[str, ...]:
        """Returns the zones of `region` that have this GPU, limited to `among` if set."""
        names = (f"{region}-{letter}" for letter in self.zones.get(region, ()))
        return tuple(name for name in names if among is None or name in among)


class GpuReservation(BaseModel):
    """A reservation of machines in one zone, which may be shared by another project."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    zone: str
    project: str | None = None


class OwnPrometheus(BaseModel):
    """The Prometheus of a cluster outside Google. KEDA queries it without credentials."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    labels: dict[str, str]
    """Labels shared by all of this deployment's series there, and by no other series."""
    has_rabbitmq: bool
    """True if the broker is RabbitMQ, whose queue lengths are exported."""


class Deployment(BaseModel):
    """The workers in one region, or in a cluster outside Google.

    Most fields come from Terraform's output `deployments` (or `outside`). The API and workers must
    agree on everything up to `rows_url`, so those values come from one place.
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
    """The bucket to which workers write rows. If empty, they write directly to BigQuery."""
    redis_cidrs: tuple[str, ...] = Field(min_length=1)
    """IP addresses of both Redis servers, for the network policy, where an empty list would allow
    everything.
    """
    audience: str = Field("", pattern=r"^(//iam\.googleapis\.com/\S+)?$")
    """The workers' token audience. Empty on GKE, which doesn't need these tokens."""
    is_self_hosted: bool = False
    """True if the whole deployment is in a cluster outside Google (self_hosted.py)."""
    time_slicing: bool = False
    """True if nodes outside Google have a label for the number of workers per GPU."""
    settings: dict[str, str] = {}
    """Additional environment variables for the workers."""
    models: tuple[str, ...] | None = None
    """Catalog models to run there. None means all of them."""
    spot: bool
    overflow: GpuTypeName | None
    """GPU type to use wherever the requested one is out of stock."""
    reservations: dict[GpuTypeName, GpuReservation] = {}
    """Reservations, keyed by GPU type. They are used first."""
    weights_bucket: str | None = None
    """The bucket filled by `penstock weights prefetch`. None means that workers download from the
    Hub.
    """
    hub_token: str | None = None
    """The secret that contains a token for gated models on the Hub."""
    zones: tuple[str, ...] | None = None
    """Zones for GPU nodes. None means all zones in the region that have the GPU."""
    compute_classes: bool
    """True if nodes come from ComputeClasses instead of the node pools created by Terraform."""
    traces: dict[str, str] = {}
    """OpenTelemetry variables for the workers. If empty, no spans are recorded."""
    image: str = Field(pattern=r"^[^@\s]+(@sha256:[0-9a-f]{64}|:[A-Za-z0-9._-]+)$")
    """The worker image, by digest or tag."""
    prometheus: OwnPrometheus | None = None
    """The autoscaler's source of metrics. None means Managed Prometheus on GKE, and no autoscaler
    elsewhere.
    """
    buffer: int = Field(1, ge=0)
    """Number of warm places to keep for each GPU node class."""

    @property
    def is_outside(self) -> bool:
        """True if the cluster is outside Google, without GKE's nodes, metrics, and identities."""
        return bool(self.audience) or self.is_self_hosted

    @property
    def is_scaled(self) -> bool:
        """True if an autoscaler sets the number of workers."""
        return not self.is_outside or self.prometheus is not None

    @property
    def metrics_url(self) -> str:
        """The URL for Prometheus queries; defaults to Managed Prometheus.

        KEDA's Pub/Sub scaler is deprecated because it uses Monitoring's old query language:
        https://keda.sh/docs/2.18/scalers/gcp-pub-sub/
        """
        if self.prometheus is not None:
            return self.prometheus.url
        return f"https://monitoring.googleapis.com/v1/projects/{self.project}/location/global/prometheus"


def read_deployment(path: Path, region: str, **options: object) -> Deployment:
    """Reads the deployment of `region` from `terraform output -json deployments`, adding `options`.

    Raises:
        ConfigurationError: the file can't be read or does not contain this region, or a field is
        missing or invalid.
    """
    try:
        regions = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if not isinstance(regions, dict) or region not in regions:
        known = ", ".join(regions) if isinstance(regions, dict) else "none"
        raise ConfigurationError(
            f"{path}: no region {region!r}; available: {known}", field="region"
        )
    if not isinstance(regions[region], dict):
        raise ConfigurationError(f"{path}: {region}: must be an object", field=region)
    try:
        return Deployment.model_validate(regions[region] | options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{path}: {where}: {first['msg']}", field=where) from error


@cache
def read_gpu_types() -> dict[str, GpuType]:
    """Returns the GPU types, keyed by the names used in models.yaml."""
    return TypeAdapter(dict[str, GpuType]).validate_python(
        yaml.safe_load(GPU_TYPES_FILE.read_text(encoding="utf-8"))
    )


def zones_with(
    type_: str, region: str, gpu_types: dict[str, GpuType], among: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Returns the zones of a region whose nodes can have this GPU.

    Raises:
        ConfigurationError: there are no such zones. Terraform rejects the same configurations.
    """
    if zones := gpu_types[type_].zones_in(region, among):
        return zones
    left_out = "" if among is None else f", of {', '.join(among)}"
    raise ConfigurationError(
        f"regions.{region}: no zone has {type_}{left_out} (infra/kubernetes/gpus.yaml)",
        field=f"regions.{region}",
    )


def gpu_class(gpu: Gpu) -> str:
    """Returns the node class for this GPU's type, share, count, sharing method, and provisioning.

    Terraform labels its pools with this class.
    """
    several = f"-{gpu.count}gpus" if gpu.count > 1 else ""
    mps = "-mps" if gpu.sharing == "mps" else ""
    flex = "-flex" if gpu.provisioning == "flex-start" else ""
    return f"{gpu.type}-x{gpu.share}{several}{mps}{flex}"
