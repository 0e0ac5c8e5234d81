"""`penstock deploy plan` with the figures of `penstock models measure`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.planning.deploy.__main__ import main
from shared.model_interface import ModelInterface
from shared.model_measurement import ModelMeasurement

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
    (tmp_path / "mine" / "schema.json").write_text(INTERFACE.as_json)
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
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 1
    return capsys.readouterr().err


def test_a_measured_model_needs_no_seconds(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_measured(folder / "mine" / "measured.json")
    words = ["--models", str(catalog(folder)), "--rate", "mine=2:8"]
    (found,) = plan(capsys, *words)["models"]
    # Four items take a second.
    assert (found["service_s"], found["batch"]) == (0.25, 4)
    assert found["rate"]["measured"] == "on a CPU of a test"
    assert (found["rate"]["input_bytes"], found["rate"]["output_bytes"]) == (1000, 9000)
    assert main(["plan", *words]) == 0
    assert "mine: 0.25 s an item: on a CPU of a test" in capsys.readouterr().out


def test_what_rates_say_goes_before(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_measured(folder / "mine" / "measured.json")
    words = ["--rate", "mine=2", "--seconds", "mine=0.1"]
    (found,) = plan(capsys, "--models", str(catalog(folder)), *words)["models"]
    assert (found["service_s"], found["rate"]["measured"]) == (0.1, "given on the command line")


def test_a_model_that_is_elsewhere_has_its_figures_beside_the_rates(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_measured(folder / "mine.json", batches={1: 0.125})
    models = catalog(folder, source="gs://bucket/mine", interface="mine/schema.json")
    rates = folder / "rates.yaml"
    rates.write_text("models: {mine: {mean_per_s: 2, measurement: mine.json, output_bytes: 7}}")
    (found,) = plan(capsys, "--models", str(models), "--rates", str(rates))["models"]
    assert (found["service_s"], found["rate"]["output_bytes"]) == (0.125, 7)


def test_without_figures_the_command_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "--models", str(catalog(folder)), "--rate", "mine=2")
    assert "models.mine: seconds_per_item is missing" in said
    assert "penstock models measure FOLDER" in said


@pytest.mark.parametrize(
    ("gpu", "measured", "reason"),
    [
        ("none", {"sources_sha256": "b" * 64}, "the sources have changed since"),
        ("l4", {}, "measured on cpu, and gpu.type is l4"),
        ("none", {"device": "NVIDIA L4"}, "measured on NVIDIA L4, and gpu.type is none"),
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
    write_measured(folder / "mine" / "measured.json", **measured)
    models = catalog(folder, gpu={"type": gpu})
    said = refusal(capsys, "--models", str(models), "--rate", "mine=2")
    assert reason in said
    assert f"measure again: penstock models measure {folder / 'mine'}" in said


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
    (folder / "mine" / "measured.json").write_text('{"device": "cpu"}')
    said = refusal(capsys, "--models", str(catalog(folder)), "--rate", "mine=2")
    assert "measured.json: measured: Field required" in said


def test_more_memory_than_a_worker_has_is_noted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_measured(folder / "mine" / "measured.json", peak_memory_bytes=3 * 2**30)
    words = ["--models", str(catalog(folder)), "--rate", "mine=2"]
    notes = plan(capsys, *words)["notes"]
    assert any("mine: 2 processes of a worker take up to 6,144 MiB" in note for note in notes)
