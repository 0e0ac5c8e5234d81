"""Plans and simulations that use figures from `penstock optimize --device`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock_planning.simulation.world import simulate
from shared.models.device_profile import DeviceProfile
from tests.penstock_command import penstock as run_penstock
from tools.planning.tests.simulation.worlds import scenario

TEXTS: dict[str, Any] = {
    "name": "texts",
    "task": "embedding",
    "source": "hf:a/b",
    "dimensions": 384,
    "gpu": {"type": "l4"},
}
IMAGES: dict[str, Any] = {
    "name": "images",
    "task": "image",
    "source": "hf:a/c",
    "batch": {"max_pixel_steps": 50_000_000, "max_items": 4},
    "gpu": {"type": "l4"},
    "image": {"width": 512, "height": 512, "steps": 20},
}


def profile(**fields: Any) -> DeviceProfile:
    figures = {
        "model": "texts",
        "revision": "main",
        "device": "NVIDIA L4",
        "measured": "made up for a test",
        "batch_tokens": 8192,
        "tokens_per_s": {2048: 50_000, 8192: 100_000, 32_768: 120_000},
    }
    return DeviceProfile.model_validate(figures | fields)


OF_IMAGES: dict[str, Any] = {
    "model": "images",
    "batch_tokens": None,
    "tokens_per_s": {},
    "images": [
        {"width": side, "height": side, "steps": 20, "items": items, "batch_s": batch_s}
        for side, items, batch_s in [(512, 1, 2.0), (512, 4, 4.0), (512, 8, 6.0), (1024, 4, 20.0)]
    ],
}


def words(folder: Path, rates: dict[str, Any], *profiles: DeviceProfile) -> list[str]:
    """Writes a catalog, rates and profiles. Returns the options for `deploy plan`."""
    (folder / "models.yaml").write_text(json.dumps({"models": [TEXTS, IMAGES]}))
    (folder / "rates.yaml").write_text(json.dumps({"models": rates}))
    for number, figures in enumerate(profiles):
        (folder / f"{number}.device.json").write_text(figures.model_dump_json())
    options = ["--models", str(folder / "models.yaml"), "--rates", str(folder / "rates.yaml")]
    return [*options, *(["--profile", str(folder)] if profiles else [])]


def plan(capsys: pytest.CaptureFixture[str], options: list[str]) -> dict[str, Any]:
    assert run_penstock("deploy", "plan", *options, "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    return {model["model"]: model for model in planned["models"]} | {"notes": planned["notes"]}


def refusal(capsys: pytest.CaptureFixture[str], options: list[str]) -> str:
    assert run_penstock("deploy", "plan", *options) == 1
    return capsys.readouterr().err


def test_a_profile_replaces_seconds_and_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"texts": {"mean_per_s": 10, "tokens_per_item": 100}, "images": {"mean_per_s": 1}}
    found = plan(capsys, words(tmp_path, rates, profile(), profile(**OF_IMAGES)))
    assert (found["texts"]["service_s"], found["texts"]["batch"]) == (0.001, 81)
    assert found["texts"]["rate"]["measured"] == "NVIDIA L4: made up for a test"
    assert found["images"]["service_s"] == 1.0  # for each of four at a time, at the default size


def test_without_a_profile_the_batch_is_the_usual_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {
        "texts": {
            "mean_per_s": 10,
            "tokens_per_item": 100,
            "seconds_per_item": 0.05,
            "measured": "a test",
        }
    }
    assert plan(capsys, words(tmp_path, rates))["texts"]["batch"] == 20
    # Seconds in the rates take precedence over a profile.
    assert plan(capsys, words(tmp_path, rates, profile()))["texts"]["service_s"] == 0.05


@pytest.mark.parametrize(
    ("changes", "rate", "reason"),
    [
        ({"device": "NVIDIA H200"}, {}, "models.texts: not measured on l4"),
        ({"device": "cpu"}, {}, "not measured on l4"),
        ({"revision": "2"}, {}, "not measured on l4"),
        ({"tokens_per_s": {}}, {}, "not measured on l4"),
        ({}, {"tokens_per_item": None}, "models.texts.tokens_per_item is missing"),
    ],
)
def test_what_was_not_measured_is_not_guessed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    rate: dict[str, Any],
    reason: str,
) -> None:
    rates = {"texts": {"mean_per_s": 10, "tokens_per_item": 100} | rate}
    assert reason in refusal(capsys, words(tmp_path, rates, profile(**changes)))


def test_a_model_without_load_needs_no_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {
        "texts": {"mean_per_s": 10, "tokens_per_item": 100},
        "images": {"mean_per_s": 0},
    }
    assert plan(capsys, words(tmp_path, rates, profile()))["images"]["processes_peak"] == 0


def test_gpu_is_shared_by_as_many_workers_as_the_host_needs_to_fill_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"texts": {"mean_per_s": 600, "tokens_per_item": 100}}
    before = plan(capsys, words(tmp_path, rates, profile()))
    found = plan(capsys, words(tmp_path, rates, profile(text_us=5000.0)))
    assert before["texts"]["processes_peak"] == 1
    assert found["texts"]["processes_peak"] >= 600 * 0.005 / 0.7
    assert not [note for note in before["notes"] if "I/O process" in note]
    assert [note for note in found["notes"] if "I/O process" in note] == [
        "texts: a worker's I/O process handles 200 items/s, but its part of the GPU computes "
        "1,000/s; set gpu.share: 5 so that 5 workers share each GPU (now 1)"
    ]


def test_workers_that_share_a_gpu_as_planned_are_not_limited_by_the_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TEXTS, "gpu", {"type": "l4", "share": 5})
    rates = {"texts": {"mean_per_s": 600, "tokens_per_item": 100}}
    found = plan(capsys, words(tmp_path, rates, profile(text_us=5000.0)))
    assert not [note for note in found["notes"] if "I/O process" in note]


def test_a_broken_profile_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = words(tmp_path, {"texts": {"mean_per_s": 10}})
    (tmp_path / "l4.device.json").write_text('{"model": "texts"}')
    assert "l4.device.json: revision: Field required" in refusal(
        capsys, [*options, "--profile", str(tmp_path)]
    )
    (tmp_path / "l4.device.json").unlink()
    assert "contains no *.device.json file" in refusal(
        capsys, [*options, "--profile", str(tmp_path)]
    )


def test_a_simulation_uses_a_profile() -> None:
    world = scenario(
        entry={"batch": {"max_tokens": 32_768, "max_items": 64}},
        load={"tokens_per_item": 100},
    )
    slow = simulate(world).summary.models[0].p95_s
    fast = simulate(world, profiles=[profile(model="model")]).summary.models[0].p95_s
    assert slow is not None
    assert fast is not None
    assert slow > 1.0 > fast
    of_another_model = profile()
    assert simulate(world, profiles=[of_another_model]).summary.models[0].p95_s == slow
