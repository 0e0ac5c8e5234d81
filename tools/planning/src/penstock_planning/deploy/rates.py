"""Expected request rates, from a file or the command line.

There are no defaults for measured values.

Results of `penstock models measure` for custom models fill in missing rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from penstock_planning.entry import Entry, to_configuration_error
from penstock_planning.item_load import ItemLoad, check_work
from penstock_planning.profiles import Profiles, find_seconds
from shared.errors import ConfigurationError
from shared.models.catalog import Catalog, Model
from shared.models.catalog_file import LOCAL
from shared.models.measurement import MEASUREMENT_FILE, ModelMeasurement, read_measurement

FIELD = "measurement"
"""The field with the path to a model's penstock.measured.json, relative to the rates file."""

BROKER_ROUND_TRIP_S = 0.05
"""Time from publish to receipt over Pub/Sub within a region: p90 46.8 ms with Google's Go client at
100 messages/s (https://github.com/davidxia/cloud-message-latency, "Metrics", 2021).
"""
MAX_BROKER_ROUND_TRIP_S = 5.0
GIVEN_HERE = "given on the command line"
HOW_TO_MEASURE = (
    "worker seconds per item on the GPU of the catalog. If the model already runs on it, "
    "`penstock report batches` shows them (inference_ms_per_item / 1000; for texts only in hours "
    "whose fill_percent is near 100); otherwise run `penstock optimize MODEL --device` on a "
    "machine with that GPU and pass its file as --profile, or for a custom model with "
    "`penstock models measure FOLDER`"
)


def with_measurements(
    document: Any, catalog: Catalog, folder: Path, profiles: Profiles = ()
) -> Any:
    """Adds measured seconds to rates that do not specify them.

    For a class with `work`, the seconds are per unit of work, so the rates may specify a different
    amount of work per item than the measured inputs required.

    Args:
        document: the rates, not validated yet.
        folder: folder of the rates file.

    Raises:
        ConfigurationError: a penstock.measured.json is invalid, or was measured with different
            sources or on a different GPU.
    """
    models = document.get("models") if isinstance(document, dict) else None
    if not isinstance(models, dict):
        return document
    served = {model.name: model for model in catalog.models}
    filled = {
        name: _fill(served[name], rate, folder, profiles)
        if name in served and isinstance(rate, dict)
        else rate
        for name, rate in models.items()
    }
    return {**document, "models": filled}


def _fill(model: Model, rate: dict[str, Any], folder: Path, profiles: Profiles) -> dict[str, Any]:
    if model.definition.has_interface:
        return _fill_rate(model, rate, folder)
    if "seconds_per_item" in rate:
        return rate
    try:
        return {**find_seconds(model, rate, profiles, f"models.{model.name}"), **rate}
    except ConfigurationError:
        if rate.get("mean_per_s"):
            raise
        return rate  # no load, unless a flow uses it


def _fill_rate(model: Model, rate: dict[str, Any], folder: Path) -> dict[str, Any]:
    own = {name: value for name, value in rate.items() if name != FIELD}
    path = _path_of(model, rate, folder)
    if path is None or rate.keys() & {"seconds_per_item", "seconds_per_work"}:
        return own
    measurement = read_measurement(path)
    _check_measurement(model, measurement, path)
    return {
        **_seconds(model, measurement),
        "measured": measurement.measured,
        "peak_memory_bytes": measurement.peak_memory_bytes,
        "input_bytes": measurement.input_bytes,
        "output_bytes": measurement.output_bytes,
        **own,
    }


def _seconds(model: Model, measurement: ModelMeasurement) -> dict[str, float]:
    seconds_per_item = measurement.seconds_per_item(model.batch.max_items)
    work = measurement.work_per_item
    if work is None:
        return {"seconds_per_item": seconds_per_item}
    return {"seconds_per_work": seconds_per_item / work, "work_per_item": work}


def _path_of(model: Model, rate: dict[str, Any], folder: Path) -> Path | None:
    """Returns the path of a model's measurement file.

    None if the rates do not name a file and the class's folder does not contain one.
    """
    if isinstance(named := rate.get(FIELD), str):
        return folder / named
    if not model.source.startswith(LOCAL):
        return None
    path = MEASUREMENT_FILE.find(Path(model.source.removeprefix(LOCAL)).expanduser())
    return path if path.exists() else None


def _check_measurement(model: Model, measurement: ModelMeasurement, path: Path) -> None:
    again = f"measure again: penstock models measure {path.parent}"
    if model.interface and model.interface.sources_sha256 != measurement.sources_sha256:
        raise ConfigurationError(
            f"models.{model.name}: {path}: the sources have changed since this measurement; "
            f"{again}",
            field=f"models.{model.name}",
        )
    if not measurement.is_of(model.gpu.type):
        raise ConfigurationError(
            f"models.{model.name}: {path}: measured on {measurement.device}, but gpu.type is "
            f"{model.gpu.type}; {again}",
            field=f"models.{model.name}",
        )


class ModelRate(ItemLoad):
    """The requests for a model, and the resources used by one of its items.

    Seconds are required if there are requests.
    """

    mean_per_s: float = Field(ge=0)
    """Requests per second, averaged over a month."""
    peak_per_s: float | None = Field(None, ge=0)
    """Requests per second in the busiest minutes. Defaults to the mean."""
    items_per_request: float = Field(1.0, ge=1)
    hit_share: float = Field(0.0, ge=0, le=1)
    """Share of all items that are served from the cache."""
    measured_share: int = Field(1, ge=1, le=48)
    """Number of busy workers on the same GPU during the measurement."""
    input_bytes: int | None = Field(None, ge=0)
    """Size of an item as sent by the caller."""
    output_bytes: int | None = Field(None, ge=0)
    """Size of an item's result as received by the caller."""
    peak_memory_bytes: int | None = Field(None, gt=0)
    """Maximum memory used by a process of a custom model."""

    @model_validator(mode="after")
    def _peak_is_above_the_mean(self) -> Self:
        if self.peak_per_s is not None and self.peak_per_s < self.mean_per_s:
            raise ValueError("peak_per_s must be at least mean_per_s")
        return self

    @model_validator(mode="after")
    def _seconds_are_measured(self) -> Self:
        if self.peak > 0 and self.item_s is None:
            raise ValueError(f"seconds_per_item is required: {HOW_TO_MEASURE}")
        if self.peak > 0 and not self.measured:
            raise ValueError(
                "measured is required: the source of seconds_per_item, such as `penstock report "
                "batches, L4`"
            )
        return self

    @property
    def peak(self) -> float:
        """Requests per second at the peak."""
        return self.mean_per_s if self.peak_per_s is None else self.peak_per_s


class FlowRate(Entry):
    """The runs of a flow. Its steps are requests to their models."""

    mean_per_s: float = Field(ge=0)
    """Runs per second, averaged over a month."""
    peak_per_s: float | None = Field(None, ge=0)
    """Runs per second in the busiest minutes. Defaults to the mean."""
    items: dict[str, Annotated[float, Field(ge=0)]] = Field({})
    """Items per run in a step, keyed by step ID. Defaults to one. Required for a step with
    `for_each`.
    """

    @property
    def peak(self) -> float:
        """Runs per second at the peak."""
        return self.mean_per_s if self.peak_per_s is None else self.peak_per_s


class DemandRates(Entry):
    """The rates of all models, their distribution over regions, and the required slack."""

    models: dict[str, ModelRate] = Field(min_length=1)
    """Includes requests from flows once the rates have been read."""
    flows: dict[str, FlowRate] = Field({})
    regions: dict[str, float] = Field({})
    """Share of requests per region. Defaults to equal shares."""
    late_share: float = Field(0.001, gt=0, lt=1)
    """Share of requests at the peak that may wait beyond the deadline."""
    api_requests_per_s: float | None = Field(None, gt=0)
    """Measured throughput of an API instance. If this is unset, only the instance's concurrency
    counts.
    """
    broker_round_trip_s: float = Field(BROKER_ROUND_TRIP_S, ge=0, le=MAX_BROKER_ROUND_TRIP_S)
    """Seconds from a worker to the broker and back, as measured by
    `penstock_worker_round_trip_seconds`.

    A job and its reply take one round trip each.
    """

    @model_validator(mode="after")
    def _shares_add_up(self) -> Self:
        if self.regions and (
            min(self.regions.values()) < 0 or abs(sum(self.regions.values()) - 1) > 1e-6
        ):
            raise ValueError("the regions' shares must be at least 0 and add up to 1")
        return self


def read_rates(path: Path, catalog: Catalog, profiles: Profiles = ()) -> DemandRates:
    """Reads a rates file. Device profiles supply any missing seconds.

    Raises:
        ConfigurationError: the file can't be read, or a field is invalid, is missing, or names an
        unknown model.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return _check_rates(document, catalog, str(path), path.parent, profiles)


def at_distance(rates: DemandRates, round_trip_s: float) -> DemandRates:
    """Returns the same rates with a different broker round trip.

    Raises:
        ConfigurationError: the value is out of range.
    """
    if not 0 <= round_trip_s <= MAX_BROKER_ROUND_TRIP_S:
        raise ConfigurationError(
            f"--broker-round-trip: must be from 0 to {MAX_BROKER_ROUND_TRIP_S:g} seconds, "
            f"got {round_trip_s:g}",
            field="broker_round_trip",
        )
    return rates.model_copy(update={"broker_round_trip_s": round_trip_s})


def rates_of_words(
    rates: Sequence[str], seconds: Sequence[str], catalog: Catalog, profiles: Profiles = ()
) -> DemandRates:
    """Returns the rates specified by `--rate MODEL=MEAN[:PEAK]` and `--seconds MODEL=SECONDS`.

    Raises:
        ConfigurationError: an option is malformed or names an unknown model, or seconds are
        missing.
    """
    models: dict[str, dict[str, Any]] = {}
    for word in rates:
        name, values = _split(word, "--rate MODEL=MEAN[:PEAK]", max_values=2)
        if name in models:
            raise ConfigurationError(f"--rate {word}: {name!r} already has a rate", field=name)
        models[name] = dict(zip(("mean_per_s", "peak_per_s"), values, strict=False))
    for word in seconds:
        name, (value,) = _split(word, "--seconds MODEL=SECONDS", max_values=1)
        if name not in models:
            raise ConfigurationError(f"--seconds {word}: no --rate for {name!r}", field=name)
        models[name] |= {"seconds_per_item": value, "measured": GIVEN_HERE}
    return _check_rates({"models": models}, catalog, "--rate", profiles=profiles)


def _split(word: str, form: str, max_values: int) -> tuple[str, list[float]]:
    name, _, tail = word.rpartition("=")
    try:
        values = [float(part) for part in tail.split(":")]
    except ValueError:
        values = []
    if not name or not 1 <= len(values) <= max_values:
        raise ConfigurationError(f"{word!r} must have the form {form}", field=form.split()[0])
    return name, values


def _check_rates(
    document: object,
    catalog: Catalog,
    where: str,
    folder: Path = Path(),
    profiles: Profiles = (),
) -> DemandRates:
    try:
        rates = DemandRates.model_validate(with_measurements(document, catalog, folder, profiles))
    except ValidationError as error:
        raise to_configuration_error(error, where) from error
    known = {model.name: model for model in catalog.models}
    for name, rate in rates.models.items():
        if name not in known:
            served = ", ".join(sorted(known))
            raise ConfigurationError(
                f"{where}: models.{name}: not in the catalog, which contains: {served}", field=name
            )
        check_work(known[name], rate, f"{where}: models.{name}")
    return _with_flows(rates, catalog, where)


def _with_flows(rates: DemandRates, catalog: Catalog, where: str) -> DemandRates:
    """Adds flow steps' requests to their models' rates.

    Raises:
        ConfigurationError: a flow or step is not in the catalog, or its rates are incomplete.
    """
    models = dict(rates.models)
    for name, rate in rates.flows.items():
        place = f"{where}: flows.{name}"
        flow = next((candidate for candidate in catalog.flows if candidate.name == name), None)
        if flow is None:
            served = ", ".join(sorted(known.name for known in catalog.flows)) or "none"
            raise ConfigurationError(
                f"{place}: not in the catalog, which contains: {served}", field=name
            )
        if unknown := rate.items.keys() - {step.id for step, _ in flow.steps}:
            raise ConfigurationError(f"{place}.items: no step {min(unknown)!r}", field=name)
        for step, model in flow.steps:
            if step.for_each is not None and step.id not in rate.items:
                raise ConfigurationError(
                    f"{place}.items.{step.id}: is required: the number of items in its for_each",
                    field=name,
                )
            if model.name not in models:
                raise ConfigurationError(
                    f"{place}: models.{model.name} is required: set its time per item, "
                    "and mean_per_s to 0 if only flows use it",
                    field=name,
                )
            items = rate.items.get(step.id, 1.0)
            models[model.name] = _more(models[model.name], rate, items, f"{where}: {model.name}")
    return rates.model_copy(update={"models": models})


def _more(model: ModelRate, flow: FlowRate, items: float, where: str) -> ModelRate:
    """Returns a model's rate plus this many items per flow run, each sent as a separate request."""
    mean, peak = (model.mean_per_s + flow.mean_per_s * items, model.peak + flow.peak * items)
    own = model.peak * model.items_per_request
    fields = model.model_dump(exclude_unset=True) | {
        "mean_per_s": mean,
        "peak_per_s": peak,
        "items_per_request": (own + flow.peak * items) / peak if peak else 1.0,
    }
    try:
        return ModelRate.model_validate(fields)
    except ValidationError as error:
        raise to_configuration_error(error, where) from error
