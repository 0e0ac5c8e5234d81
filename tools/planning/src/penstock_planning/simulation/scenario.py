"""A scenario in YAML: the requests that arrive, the system that serves them, and failures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from penstock_planning.deploy.platform_variables import ApiVariable
from penstock_planning.entry import Entry, to_configuration_error
from penstock_planning.simulation.model_load import ModelLoad
from penstock_planning.simulation.streams import Arrivals, Seconds
from shared.errors import ConfigurationError

SHIPPED = Path(__file__).parent / "scenarios"

MAX_BASES = 8


class ScenarioRegion(Entry):
    """A region in the deployment."""

    share: float = Field(gt=0, le=1)
    """Share of all requests."""
    max_gpus: int | None = Field(None, ge=0)
    """Quota or stock of GPU nodes. No limit by default."""


class Cluster(Entry):
    """Delays for nodes and pods, and how much capacity is kept warm.

    For sources see docs/explanation/simulation.md.
    """

    node_start_s: Seconds = 150.0
    """Time from ordering a GPU node until pods can start on it."""
    pod_start_s: Seconds = 60.0
    """Time from a worker's placement on a node until it is warm and pulls jobs."""
    node_idle_s: Seconds = 600.0
    """Time until an empty node is deleted: cluster-autoscaler's scale-down-unneeded-time."""
    tick_s: float = Field(10.0, gt=0)
    """The cluster autoscaler's scan-interval."""
    buffer: int = Field(1, ge=0)
    """Warm places for each GPU class, as in `python -m infra.kubernetes --buffer`."""
    spot: bool = True
    spot_notice_s: Seconds = 30.0
    """Time from a spot node's notice to its termination."""
    spot_losses_per_node_day: float = Field(0.0, ge=0)
    """Random losses of individual spot nodes."""


class ScenarioApi(Entry):
    """Each region's API."""

    max_instances: int = Field(ApiVariable().max_instances, ge=1)
    concurrency: int = Field(ApiVariable().concurrency, ge=1)
    trip_s: Seconds = 0.1
    """Round trip over Pub/Sub: 2 x BROKER_ROUND_TRIP_S from penstock_planning/deploy/rates.py."""


class ScenarioBroker(Entry):
    """Settings for how Pub/Sub delivers jobs to workers."""

    delivery: Literal["random", "idle_first"] = "random"
    """`random`: to any worker whose flow control has room. Pub/Sub guarantees nothing better."""
    lease_s: Seconds = 20.0
    """Lease on a job that a worker holds (PubSubTransport.subscribe), renewed after each third."""
    round_trip_s: Seconds = 0.0
    """Round-trip seconds between a worker and its broker.

    A finished job's permit is reused after two round trips (shared/models/service_rate.py). 0 means
    immediately. A request's trip time is `api.trip_s`.
    """
    batches_held: int | None = Field(None, ge=1)
    """Number of full batches that a worker holds at any distance.

    None means that workers behave like real ones, which hold two batches near the broker and more
    the farther away they are (shared/models/service_rate.py).
    """


class Metrics(Entry):
    """Delays before queries see a sample."""

    scrape_s: float = Field(10.0, gt=0)
    """Interval of PodMonitoring and the API's collector
    (infra/kubernetes/cluster/pod-monitoring.yaml).
    """
    age_s: Seconds = 5.0
    """Delay between a scrape and when queries see it."""
    has_stale_markers: bool = False
    """True if queries see immediately that a target is gone.

    This is true for Prometheus but not for Google's backend
    (cloud.google.com/stackdriver/docs/managed-prometheus/promql-differences).
    """
    pubsub_sample_s: float = Field(60.0, gt=0)
    """Sampling interval of Pub/Sub's gauges."""
    pubsub_age_s: Seconds = 120.0
    """Delay before queries see these gauges (cloud.google.com/monitoring/api/metrics_gcp)."""


class SpotLoss(Entry):
    """Some of the spot nodes receive a termination notice at the same time."""

    kind: Literal["spot_loss"]
    at_s: Seconds
    share: float = Field(gt=0, le=1)
    region: str | None = None
    """None means all."""


class StockOut(Entry):
    """No GPU nodes are available for a while."""

    kind: Literal["stock_out"]
    at_s: Seconds
    for_s: float = Field(gt=0)
    gpu: str | None = None
    """A GPU type in models.yaml. None means all."""
    region: str | None = None


class GpuFailure(Entry):
    """GPUs fail, each on a different node (decision 98).

    Their workers exit, and their nodes are drained and deleted.
    """

    kind: Literal["gpu_failure"]
    at_s: Seconds
    count: int = Field(1, ge=1)
    gpu: str | None = None
    """A GPU type from models.yaml. None means all."""
    region: str | None = None
    """None means all."""
    worker_leaves_s: Seconds = 20.0
    """Time until a worker has lost its GPU twice in a row, at which point it exits. An assumption.
    """
    node_emptied_s: Seconds = 45.0
    """Time until the node reports the failure as a condition and workers/gpu_nodes.py, which checks
    every 15 s, has cordoned the node. An assumption.
    """


class RegionLoss(Entry):
    """A region goes down for a while: its API, nodes, and workers. Callers use the others."""

    kind: Literal["region_loss"]
    at_s: Seconds
    for_s: float = Field(gt=0)
    region: str


class MetricsOutage(Entry):
    """Metrics are unavailable for a while."""

    kind: Literal["metrics_outage"]
    at_s: Seconds
    for_s: float = Field(gt=0)
    what: Literal["endpoint", "samples"] = "endpoint"
    """`endpoint`: queries fail. `samples`: queries succeed, but nothing new is scraped."""
    metrics: tuple[str, ...] = ()
    """Name prefixes of the affected metrics. Empty means all metrics."""


class RolloutEvent(Entry):
    """A new version of a model's workers, rolled out with the Deployment's settings."""

    kind: Literal["rollout"]
    at_s: Seconds
    model: str


class SetReplicas(Entry):
    """An operator, rather than the autoscaler, sets a model's number of workers in each region."""

    kind: Literal["set_replicas"]
    at_s: Seconds
    model: str
    count: int = Field(ge=0)
    is_kill: bool = False
    """True if surplus workers die immediately along with the jobs they hold, rather than draining.
    """


Event = Annotated[
    SpotLoss | StockOut | GpuFailure | RegionLoss | MetricsOutage | RolloutEvent | SetReplicas,
    Field(discriminator="kind"),
]


class ScenarioFlow(Entry):
    """The runs of a flow. Each step is a one-item request to its model."""

    steps: tuple[str, ...] = Field(min_length=1)
    """The models in order."""
    arrivals: tuple[Arrivals, ...] = Field(min_length=1)
    deadline_s: float = Field(60.0, gt=0)
    """Deadline for all steps combined."""


class Scenario(Entry):
    """Everything that a simulation needs in addition to the deployed rules."""

    about: str = ""
    duration_s: float = Field(gt=0)
    settle_s: Seconds = 600.0
    """Time after which replica counts are evaluated."""
    seed: int = 0
    catalog: Path | tuple[dict[str, Any], ...] = Path("models.yaml")
    """A catalog's path, relative to the scenario, or the catalog entries themselves."""
    models: dict[str, ModelLoad] = Field(min_length=1)
    """Load by model name in the catalog. Models without an entry are not simulated."""
    workers: tuple[dict[str, Any], ...] = ()
    """The catalog's `workers` list, if the catalog entries are specified here."""
    flows: dict[str, ScenarioFlow] = Field({})
    """Flows by name. Their steps add to the load on the models they use."""
    regions: dict[str, ScenarioRegion] = Field(
        {"us-central1": ScenarioRegion(share=1.0)}, min_length=1
    )
    cluster: Cluster = Cluster()
    api: ScenarioApi = ScenarioApi()
    broker: ScenarioBroker = ScenarioBroker()
    metrics: Metrics = Metrics()
    events: tuple[Event, ...] = ()

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        if abs(sum(region.share for region in self.regions.values()) - 1) > 1e-6:
            raise ValueError("the regions' shares must add up to 1")
        for name, flow in self.flows.items():
            if unknown := [step for step in flow.steps if step not in self.models]:
                raise ValueError(f"flows.{name}.steps: model {unknown[0]!r} does not exist")
        of_flows = {step for flow in self.flows.values() for step in flow.steps}
        for name, load in self.models.items():
            if not load.arrivals and name not in of_flows:
                raise ValueError(
                    f"models.{name}.arrivals: is required because no flow uses the model"
                )
        for event in self.events:
            region = getattr(event, "region", None)
            if region is not None and region not in self.regions:
                raise ValueError(f"events: {event.kind}: region {region!r} does not exist")
            model = getattr(event, "model", None)
            if model is not None and model not in self.models:
                raise ValueError(f"events: {event.kind}: model {model!r} does not exist")
        return self


def read_scenario(name: str, changes: tuple[str, ...] = ()) -> Scenario:
    """Reads a scenario.

    A file may specify a `base`: another file whose fields are the defaults.

    Args:
        name: a file, or the name of a shipped scenario.
        changes: `key=value`, with dots between keys. The value is YAML.

    Raises:
        ConfigurationError: the scenario can't be read, or a field is invalid. The message names the
        field.
    """
    path = Path(name)
    if not path.suffix and (SHIPPED / f"{name}.yaml").is_file():
        path = SHIPPED / f"{name}.yaml"
    document = _read(path)
    for change in changes:
        document = _apply_change(document, change)
    return scenario_of(document, str(path))


def _read(path: Path, nested: int = 0) -> Any:
    """Returns a file's contents, including what it inherits from its `base`."""
    if nested > MAX_BASES:
        raise ConfigurationError(
            f"{path}: base: exceeds the maximum of {MAX_BASES} levels", field="base"
        )
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.yaml")))
        raise ConfigurationError(
            f"{path}: {error.strerror}; shipped scenarios: {known}", field="scenario"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}", field="scenario") from error
    document = _with_paths(document, path.parent)
    if isinstance(document, dict) and isinstance(base := document.pop("base", None), Path):
        return _merge(_read(base, nested + 1), document)
    return document


def _merge(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {key: _merge(base.get(key), value) for key, value in over.items()}
    return over


def scenario_of(document: object, where: str = "scenario") -> Scenario:
    """Checks a scenario.

    Raises:
        ConfigurationError: a field is invalid.
    """
    try:
        return Scenario.model_validate(document)
    except ValidationError as error:
        raise to_configuration_error(error, where) from error


def _apply_change(document: Any, change: str) -> Any:
    key, is_set, value = change.partition("=")
    if not is_set or not key:
        raise ConfigurationError(f"--set {change}: must have the form KEY=VALUE", field="set")
    try:
        return _with(document, key.split("."), yaml.safe_load(value))
    except (KeyError, IndexError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--set {change}: the field does not exist", field=key) from error


def _with(document: Any, keys: list[str], value: Any) -> Any:
    if not keys:
        return value
    if isinstance(document, list):
        index = int(keys[0])
        return [*document[:index], _with(document[index], keys[1:], value), *document[index + 1 :]]
    # Model names may contain dots, so the longest existing key wins.
    for length in range(len(keys), 0, -1):
        name = ".".join(keys[:length])
        if name in (document or {}):
            return {**document, name: _with(document[name], keys[length:], value)}
    return {**(document or {}), keys[0]: _with({}, keys[1:], value)}


def _with_paths(document: Any, folder: Path) -> Any:
    """Resolves a scenario's paths, which are relative to the scenario file."""
    if isinstance(document, dict):
        if isinstance(document.get("catalog"), str):
            document = document | {"catalog": folder / document["catalog"]}
        return {
            key: folder / value
            if key in ("file", "base") and isinstance(value, str)
            else _with_paths(value, folder)
            for key, value in document.items()
        }
    return (
        [_with_paths(element, folder) for element in document]
        if isinstance(document, list)
        else document
    )
