"""From an embedding model's folder to an artifact, using the command, and back, using the code with
which workers read it.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from shared.models.device_profile import read_profiles
from tests.workers.optimize.tiny_bert import ENTRY, Optimize
from workers.autotune.hardware import detect_machine
from workers.models.artifact import Artifact, Variant, read_calibration
from workers.models.embedding.encoder_onnx import OnnxEncoder
from workers.models.embedding.model_folder import read_sentence_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
Made = Callable[[], Artifact]


def cosines(artifact: Artifact, variant: Variant, folder: Path) -> np.ndarray:
    """The cosine between each calibration text's vector, computed on its own, and the
    reference's.
    """
    encoder = OnnxEncoder(
        read_sentence_folder(folder), artifact.graph(variant), device="cpu", threads=1
    )
    encoder.open()
    calibration = read_calibration(artifact)
    vectors = [
        encoder.encode(np.frombuffer(text.ids, "<u4"), None, np.array([text.length]))[0]
        for text in calibration.texts
    ]
    return np.asarray(np.einsum("td,td->t", np.array(vectors), calibration.vectors))


def test_artifact_is_what_its_manifest_says(
    optimize: Optimize, made: Made, tiny_bert: Path
) -> None:
    assert optimize("--variants", "fp32,int8,int8-static", tolerance=0.9) == 0
    artifact = made()
    variants = {variant.name: variant for variant in artifact.manifest.variants}
    assert list(variants) == ["onnx-fp32", "onnx-int8", "onnx-int8-static"]
    for variant in variants.values():
        found = cosines(artifact, variant, tiny_bert)
        assert found.min() >= variant.cosine_min - 1e-6
        assert found.mean() == pytest.approx(variant.cosine_mean, abs=2e-3)
    assert variants["onnx-fp32"].cosine_min > 0.999999
    assert variants["onnx-int8"].size_bytes < 0.5 * variants["onnx-fp32"].size_bytes
    assert "Attention" in variants["onnx-fp32"].note
    assert artifact.manifest.measured_on == detect_machine().flags
    assert sorted(path.name for path in artifact.folder.iterdir()) == [
        "calibration.npz",
        "fp32.onnx",
        "int8-static.onnx",
        "int8.onnx",
        "manifest.json",
    ]


def test_verdicts_are_printed_as_json(
    optimize: Optimize, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optimize("--variants", "fp32", "--json") == 0
    said = capsys.readouterr()
    verdicts = json.loads(said.out)
    assert [(one["variant"], one["accepted"]) for one in verdicts["made"]] == [("onnx-fp32", True)]
    assert verdicts["folder"] == str(made().folder)
    assert "creating and evaluating fp32" in said.err
    assert optimize("--variants", "fp32", "--json") == 0
    assert [one["variant"] for one in json.loads(capsys.readouterr().out)["found"]] == ["onnx-fp32"]


def test_variant_below_the_tolerance_is_refused(
    optimize: Optimize, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optimize("--variants", "fp32,int8") == 0
    assert [variant.name for variant in made().manifest.variants] == ["onnx-fp32"]
    assert not (made().folder / "int8.onnx").exists()
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("onnx-int8 ")
    )
    assert "refused: minimum cosine 0.9" in line
    assert line.endswith("is below 0.9999")


def test_variant_that_can_not_be_loaded_leaves_no_graph(
    optimize: Optimize, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = onnxruntime.InferenceSession

    def load(graph: str, *given: Any, **more: Any) -> Any:
        if str(graph).endswith("int8.onnx"):
            raise RuntimeError("an operator is not supported")
        return real(graph, *given, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", load)
    assert optimize("--variants", "fp32,int8") == 0
    assert [variant.name for variant in made().manifest.variants] == ["onnx-fp32"]
    assert not (made().folder / "int8.onnx").exists()


def test_nothing_accepted_fails_and_writes_nothing(
    optimize: Optimize, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optimize("--variants", "int8") == 1
    told = capsys.readouterr().err
    assert "no variant was accepted" in told
    assert "onnx-int8: minimum cosine 0.9" in told
    assert list((tmp_path / "artifacts" / "tiny").iterdir()) == []


def test_own_tolerance_is_kept_with_the_variant(optimize: Optimize, made: Made) -> None:
    assert optimize("--variants", "int8", "--tolerance", "0.9") == 0
    (variant,) = made().manifest.variants
    assert variant.recipe["tolerance"] == 0.9
    assert 0.9 <= variant.cosine_min < 0.9999


def test_second_run_does_nothing_unless_forced(
    optimize: Optimize, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optimize("--variants", "fp32") == 0
    before = made().folder.joinpath("manifest.json").stat().st_ino
    capsys.readouterr()
    assert optimize("--variants", "fp32") == 0
    assert made().folder.joinpath("manifest.json").stat().st_ino == before
    assert "already exists: onnx-fp32" in capsys.readouterr().out
    assert optimize("--variants", "fp32", "--force") == 0
    assert made().folder.joinpath("manifest.json").stat().st_ino != before


def test_artifact_gains_what_it_lacks_and_keeps_what_it_has(
    optimize: Optimize, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optimize("--variants", "fp32") == 0
    before = made().graph(made().manifest.variants[0]).read_bytes()
    assert optimize("--variants", "fp32,int8") == 0, (
        "the refused one is no failure where others are kept"
    )
    assert list(made().manifest.refused) == ["onnx-int8"]
    capsys.readouterr()
    assert optimize("--variants", "fp32,int8") == 0
    assert "already exists: onnx-fp32" in capsys.readouterr().out, (
        "what missed this tolerance is not tried again"
    )
    assert optimize("--variants", "int8", "--tolerance", "0.9") == 0
    assert [variant.name for variant in made().manifest.variants] == ["onnx-fp32", "onnx-int8"]
    assert made().graph(made().manifest.variants[0]).read_bytes() == before


@pytest.mark.parametrize(
    ("words", "cut"),
    [(("--prune", "0.25"), "128 of 512 inner"), (("--prune-heads", "0.25"), "2 of 8 heads")],
    ids=str,
)
def test_pruned_model_is_smaller_and_shows_its_loss(
    optimize: Optimize,
    made: Made,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    cut: str,
) -> None:
    assert optimize("--variants", "fp32,pruned", "--tolerance", "0.1", *words) == 0
    whole, pruned = made().manifest.variants
    assert cut in pruned.note
    assert weights(made().graph(pruned)) < weights(made().graph(whole))
    assert pruned.cosine_min < 0.9999
    assert f"{pruned.cosine_min:.5f}" in capsys.readouterr().out


def weights(graph: Path) -> int:
    """Number of parameters in all matrices except the embedding tables."""
    model = onnx.load(graph)
    return sum(
        int(np.prod(weight.dims))
        for weight in model.graph.initializer
        if weight.dims and weight.dims[0] <= 256
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--variants", "fp8"), "embedding models have no variant fp8; use fp32, int8"),
        (("--variants", "pruned"), "variant pruned requires --prune or --prune-heads"),
    ],
    ids=str,
)
def test_wrong_wish_is_refused(
    optimize: Optimize, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
) -> None:
    assert optimize(*words) == 2
    assert reason in capsys.readouterr().err


@contextmanager
def making(tiny_bert: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command in a process that has just started creating a graph."""
    catalog = tmp_path / "models.yaml"
    catalog.write_text(ENTRY.format(folder=tiny_bert, tolerance=0.9))
    words = ["tiny", "--models-file", str(catalog), "--artifacts-dir", str(tmp_path / "artifacts")]
    with subprocess.Popen(
        [sys.executable, "-m", "infra.cli.main", "optimize", *words, "--variants", "fp32"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as process:
        assert process.stdout is not None
        assert any("creating and evaluating" in line for line in process.stdout)
        yield process
        process.stdout.read()


def test_who_comes_while_it_is_made_finds_it(
    optimize: Optimize,
    made: Made,
    tiny_bert: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with making(tiny_bert, tmp_path) as process:
        assert optimize("--variants", "fp32", tolerance=0.9) == 0
    assert process.returncode == 0
    told = capsys.readouterr().out
    assert "already exists: onnx-fp32" in told
    assert "creating and evaluating" not in told
    assert [variant.name for variant in made().manifest.variants] == ["onnx-fp32"]


def test_interrupted_making_leaves_nothing(tiny_bert: Path, tmp_path: Path) -> None:
    with making(tiny_bert, tmp_path) as process:
        process.send_signal(signal.SIGTERM)
    # A shell reports 130 in both cases. CPython exits with the signal if KeyboardInterrupt
    # propagates through an `exec`, for example while an imported module defines a dataclass.
    assert process.returncode in (130, -signal.SIGINT)
    assert list((tmp_path / "artifacts" / "tiny").iterdir()) == []


def test_a_device_profile_has_rates_by_batch_size(optimize: Optimize, tmp_path: Path) -> None:
    assert optimize("--device") == 0
    (profile,) = read_profiles(tmp_path / "artifacts")
    assert (profile.model, profile.revision) == ("tiny", "1")
    assert profile.batch_tokens == 2048  # the entry's bound
    assert list(profile.tokens_per_s) == [512, 2048, 8192, 32_768]
    assert min(profile.tokens_per_s.values()) > 0
    assert profile.call_us is not None
    assert profile.text_us is not None
    assert not list(tmp_path.glob("artifacts/tiny/*/manifest.json"))
