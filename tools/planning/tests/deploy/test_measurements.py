"""`penstock deploy plan` with figures from `penstock models measure`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock_planning.simulation.scenario import scenario_of
from penstock_planning.simulation.world import simulate
from shared.errors import ConfigurationError
from shared.models.interface import ModelInterface
from shared.models.measurement import ModelMeasurement
from tests.penstock_command import penstock as run_penstock

INTERFACE = ModelInterface(
    inputs={"properties": {}}, output={}, concurrency=8, cog_version="0", sources_sha256="a" * 64
)
MEASURED: dict[str, Any] = {
    "measured": "on a CPU of a test",
    "device": "cpu",
    "setup_s": 1.0,
    "batches": {1: 0.5, 4: 1.0, 8: 1.6},
    "peak_memory_bytes": 300 * 2**20,
    "input_bytes": 1000,
    "output_bytes": 9000,
    "sources_sha256": "a" * 64,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "penstock.schema.json").write_text(INTERFACE.as_json)
    return tmp_path


def catalog(folder: Path, **more: Any) -> Path:
    entry = {
        "name": "mine",
        "task": "custom",
        "source": f"local:{folder / 'mine'}",
        "batch": {"max_items": 4},
        "replicas": {"max": 100},
    }
    path = folder / "models.yaml"
    path.write_text(json.dumps({"models": [entry | more]}))
    return path


def write_measured(path: Path, **changes: Any) -> None:
    path.write_text(ModelMeasurement.model_validate(MEASURED | changes).model_dump_json())


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run_penstock("deploy", "plan", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run_penstock("deploy", "plan", *words) == 1
    return capsys.readouterr().err


def test_a_measured_model_needs_no_seconds(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_measured(folder / "mine" / "penstock.measured.json")
    words = ["--models", str(catalog(folder)), "--rate", "mine=2:8"]
    (model,) = plan(capsys, *words)["models"]
    # Four items together take one second.
    assert (model["service_s"], model["batch"]) == (0.25, 4)
    assert model["rate"]["measured"] == "on a CPU of a test"
    assert (model["rate"]["input_bytes"], model["rate"]["output_bytes"]) == (1000, 9000)
    assert run_penstock("deploy", "plan", *words) == 0
    assert "mine: 0.25 s per item: on a CPU of a test" in capsys.readouterr().out


def test_what_rates_say_goes_before(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_measured(folder / "mine" / "penstock.measured.json")
    words = ["--rate", "mine=2", "--seconds", "mine=0.1"]
    (model,) = plan(capsys, "--models", str(catalog(folder)), *words)["models"]
    assert (model["service_s"], model["rate"]["measured"]) == (0.1, "given on the command line")


def test_a_model_that_is_elsewhere_has_its_figures_beside_the_rates(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_measured(folder / "mine.json", batches={1: 0.125})
    models = catalog(folder, source="gs://bucket/mine", interface="mine/penstock.schema.json")
    rates = folder / "rates.yaml"
    rates.write_text("models: {mine: {mean_per_s: 2, measurement: mine.json, output_bytes: 7}}")
    (model,) = plan(capsys, "--models", str(models), "--rates", str(rates))["models"]
    assert (model["service_s"], model["rate"]["output_bytes"]) == (0.125, 7)


def test_without_figures_the_command_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(capsys, "--models", str(catalog(folder)), "--rate", "mine=2")
    assert "models.mine: seconds_per_item is required" in message
    assert "penstock models measure FOLDER" in message


@pytest.mark.parametrize(
    ("gpu", "measured", "reason"),
    [
        ("none", {"sources_sha256": "b" * 64}, "the sources have changed since"),
        ("l4", {}, "measured on cpu, but gpu.type is l4"),
        ("none", {"device": "NVIDIA L4"}, "measured on NVIDIA L4, but gpu.type is none"),
        ("a100-80gb", {"device": "NVIDIA A100-SXM4-40GB"}, "gpu.type is a100-80gb"),
    ],
)
def test_figures_of_something_else_are_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    gpu: str,
    measured: dict[str, Any],
    reason: str,
) -> None:
    write_measured(folder / "mine" / "penstock.measured.json", **measured)
    models = catalog(folder, gpu={"type": gpu})
    message = refusal(capsys, "--models", str(models), "--rate", "mine=2")
    assert reason in message
    assert f"measure again: penstock models measure {folder / 'mine'}" in message


@pytest.mark.parametrize(
    ("gpu", "device"),
    [
        ("l4", "NVIDIA L4"),
        ("t4", "Tesla T4"),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    ],
)
def test_a_gpu_is_known_by_its_name(gpu: str, device: str) -> None:
    measured = ModelMeasurement.model_validate(MEASURED | {"device": device})
    assert measured.is_of(gpu)
    assert not measured.is_of("none")


def test_a_file_that_is_something_else_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine" / "penstock.measured.json").write_text('{"device": "cpu"}')
    message = refusal(capsys, "--models", str(catalog(folder)), "--rate", "mine=2")
    assert "penstock.measured.json: measured: Field required" in message


def test_more_memory_than_a_worker_has_is_noted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_measured(folder / "mine" / "penstock.measured.json", peak_memory_bytes=3 * 2**30)
    words = ["--models", str(catalog(folder)), "--rate", "mine=2"]
    notes = plan(capsys, *words)["notes"]
    assert any("mine: 2 processes of a worker take up to 6,144 MiB" in note for note in notes)


@pytest.fixture
def weighing(folder: Path) -> Path:
    """Writes a class with `work`: together, 4 inputs with a work of 10 each take one second."""
    changed = INTERFACE.model_dump() | {"weighs": True, "batches": True}
    interface = ModelInterface.model_validate(changed)
    (folder / "mine" / "penstock.schema.json").write_text(interface.as_json)
    write_measured(folder / "mine" / "penstock.measured.json", work_per_item=10)
    return folder


def planned(
    folder: Path, capsys: pytest.CaptureFixture[str], rate: str, **more: Any
) -> tuple[float, int, int]:
    """Returns seconds per item, items per batch, and processes at the peak."""
    rates = folder / "rates.yaml"
    rates.write_text(f"models: {{mine: {rate}}}")
    entry = {"batch": {"max_items": 4, "max_work": 60}, "work": {"max": 1000}} | more
    words = ["--models", str(catalog(folder, **entry)), "--rates", str(rates)]
    (model,) = plan(capsys, *words)["models"]
    return model["service_s"], model["batch"], model["processes_peak"]


def test_items_count_by_their_work(weighing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(weighing, capsys, "{mean_per_s: 10}") == (0.25, 4, 4)
    # Three times the measured work takes three times as long, and only two items fit in a batch.
    assert planned(weighing, capsys, "{mean_per_s: 10, work_per_item: 30}") == (0.75, 2, 11)
    rate = "{mean_per_s: 10, work_per_item: 30, seconds_per_work: 0.1, measured: x}"
    assert planned(weighing, capsys, rate) == (3.0, 2, 43)
    rate = "{mean_per_s: 10, work_per_item: 30, seconds_per_item: 0.5, measured: x}"
    assert planned(weighing, capsys, rate) == (0.5, 2, 8)


@pytest.mark.parametrize(
    ("rate", "more", "said"),
    [
        (
            "{mean_per_s: 1, seconds_per_item: 1, measured: x}",
            {},
            "models.mine.work_per_item is required: the value that the class's `work`",
        ),
        (
            "{mean_per_s: 1, work_per_item: 2000}",
            {},
            "models.mine.work_per_item exceeds the catalog's work.max (1000)",
        ),
        (
            "{mean_per_s: 1, seconds_per_work: 1, measured: x}",
            {},
            "models.mine: work_per_item is required with seconds_per_work",
        ),
        (
            "{mean_per_s: 1, seconds_per_work: 1, seconds_per_item: 1, work_per_item: 1}",
            {},
            "models.mine: seconds_per_work and seconds_per_item are mutually exclusive",
        ),
    ],
)
def test_work_that_does_not_fit_is_refused(
    weighing: Path,
    capsys: pytest.CaptureFixture[str],
    rate: str,
    more: dict[str, Any],
    said: str,
) -> None:
    rates = weighing / "rates.yaml"
    rates.write_text(f"models: {{mine: {rate}}}")
    entry = {"batch": {"max_items": 4, "max_work": 60}, "work": {"max": 1000}} | more
    models = str(catalog(weighing, **entry))
    assert said in refusal(capsys, "--models", models, "--rates", str(rates))


def test_a_simulation_counts_the_same_work(weighing: Path) -> None:
    entry = {"batch": {"max_items": 4, "max_work": 60}, "work": {"max": 1000}}
    models = catalog(weighing, **entry)
    load = {
        "arrivals": [{"kind": "constant", "per_s": 4.0}],
        "work_per_item": 30,
        "seconds_per_work": 0.01,
        "measured": "a test",
        "start_replicas": 4,
    }
    document = {"duration_s": 600, "settle_s": 0, "catalog": models, "models": {"mine": load}}
    # Two items of 0.3 s each fill a batch, and 1.2 Erlangs keep 4 workers with two processes each
    # 15% busy.
    result = simulate(scenario_of(document))
    (summary,) = result.summary.models
    assert summary.served == pytest.approx(2400, rel=0.1)
    assert result.recorder.worker_busy_s == pytest.approx(summary.served * 0.3 / 2, rel=0.02)
    del load["work_per_item"]
    with pytest.raises(ConfigurationError, match="work_per_item is required"):
        scenario_of(document)
