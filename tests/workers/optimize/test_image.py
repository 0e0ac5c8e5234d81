"""Ways to run an image pipeline, judged against the shipped pipeline's images."""

from pathlib import Path

import pytest

from models.shapes import PIPELINE
from shared.models.device_profile import read_profiles
from tests.penstock_command import penstock
from workers.models.artifact import read_artifact

pytestmark = pytest.mark.slow

ENTRY = """\
models:
  - name: small
    task: image
    source: local:{folder}
    batch: {{max_pixel_steps: 2000000, max_items: 4}}
    image: {{width: 32, height: 32, steps: 2}}
"""


def run(tmp_path: Path, *words: str) -> int:
    catalog = tmp_path / "models.yaml"
    catalog.write_text(ENTRY.format(folder=PIPELINE))
    paths = ["--models-file", str(catalog), "--artifacts-dir", str(tmp_path / "artifacts")]
    return penstock("optimize", "small", *paths, *words)


def test_accepted_ways_are_in_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--variants", "tuned,bf16", "--tolerance", "15") == 0
    (made,) = (tmp_path / "artifacts" / "small").iterdir()
    tuned, bf16 = read_artifact(made).manifest.variants
    assert (tuned.name, tuned.precision, tuned.recipe["is_tuned"]) == ("torch-tuned", "fp32", True)
    assert tuned.recipe["psnr_db"] > 60 > bf16.recipe["psnr_db"] > 15
    assert bf16.recipe["ssim"] < 1
    assert bf16.size_bytes < 0.6 * tuned.size_bytes
    assert "PSNR dB" in capsys.readouterr().out


def test_image_below_the_tolerance_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--variants", "bf16", "--tolerance", "90") == 1
    assert "torch-bf16: minimum PSNR" in capsys.readouterr().err
    assert list((tmp_path / "artifacts" / "small").iterdir()) == []


def test_a_device_profile_has_seconds_by_size(tmp_path: Path) -> None:
    assert run(tmp_path, "--device") == 0
    (profile,) = read_profiles(tmp_path / "artifacts")
    assert profile.peak_memory_bytes is not None
    assert profile.versions["diffusers"]
    assert {(timing.width, timing.height, timing.steps) for timing in profile.images} == {
        (32, 32, 2),
        (64, 64, 2),
    }
    assert [timing.items for timing in profile.images if timing.width == 32] == [1, 4]
    assert all(timing.batch_s > 0 for timing in profile.images)
