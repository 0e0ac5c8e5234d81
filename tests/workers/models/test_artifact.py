"""An artifact is accepted only if it is complete and was made from these exact files."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shared.errors import ConfigurationError
from workers.models.artifact import (
    CALIBRATION,
    FORMAT_VERSION,
    MANIFEST,
    Calibration,
    Manifest,
    Variant,
    find_artifact,
    new_artifact,
    read_calibration,
    source_digest,
    write_calibration,
    write_manifest,
)
from workers.models.base import PreparedText

pytestmark = pytest.mark.slow

GRAPH = b"a graph"


def text_of(*ids: int, types: bytes = b"") -> PreparedText:
    return PreparedText(key="", length=len(ids), ids=np.array(ids, "<u4").tobytes(), type_ids=types)


def manifest_of(model: str = "mini", digest: str = "d1") -> Manifest:
    variant = Variant(
        name="onnx-fp32", backend="onnx", precision="fp32", file="fp32.onnx", size_bytes=len(GRAPH)
    )
    return Manifest(
        model=model,
        revision="1",
        source_digest=digest,
        made_by={"onnx": "1"},
        task="embedding",
        variants=[variant],
    )


def fill(folder: Path, manifest: Manifest) -> None:
    (folder / "fp32.onnx").write_bytes(GRAPH)
    texts = [text_of(1, 2, 3), text_of(4, 5, types=np.array([0, 1], "<u4").tobytes())]
    write_calibration(folder, Calibration(texts, np.eye(2, dtype=np.float32)))
    write_manifest(folder, manifest)


@pytest.fixture
def artifacts_dir(tmp_path: Path) -> Path:
    with new_artifact(tmp_path, "mini", "d1") as folder:
        fill(folder, manifest_of())
    return tmp_path


def test_what_was_written_is_read(artifacts_dir: Path) -> None:
    artifact = find_artifact(artifacts_dir, "mini", "d1")
    assert artifact is not None
    assert artifact.manifest == manifest_of()
    assert artifact.graph(artifact.manifest.variants[0]).read_bytes() == GRAPH
    calibration = read_calibration(artifact)
    assert [text.length for text in calibration.texts] == [3, 2]
    assert calibration.texts[0] == text_of(1, 2, 3, types=bytes(12))
    assert calibration.texts[1].type_ids == np.array([0, 1], "<u4").tobytes()
    assert calibration.vectors.tolist() == [[1, 0], [0, 1]]


def test_a_second_artifact_takes_the_place_of_the_first(artifacts_dir: Path) -> None:
    with new_artifact(artifacts_dir, "mini", "d1") as folder:
        fill(folder, manifest_of())
        (folder / "more.onnx").write_bytes(b"2")
    artifact = find_artifact(artifacts_dir, "mini", "d1")
    assert artifact is not None
    assert (artifact.folder / "more.onnx").is_file()
    assert [path.name for path in artifacts_dir.joinpath("mini").iterdir()] == ["d1"]


def test_nothing_is_left_of_an_artifact_that_was_not_finished(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt_making(tmp_path)
    assert list((tmp_path / "mini").iterdir()) == []
    with pytest.raises(ConfigurationError, match=MANIFEST), new_artifact(tmp_path, "mini", "d1"):
        pass
    assert find_artifact(tmp_path, "mini", "d1") is None


def interrupt_making(artifacts_dir: Path) -> None:
    with new_artifact(artifacts_dir, "mini", "d1") as folder:
        fill(folder, manifest_of())
        raise KeyboardInterrupt


def test_other_source_files_have_no_artifact(artifacts_dir: Path) -> None:
    assert find_artifact(artifacts_dir, "mini", "d2") is None
    assert find_artifact(artifacts_dir, "other", "d1") is None


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "fp32.onnx").unlink(), "must be 7 bytes"),
        (lambda folder: (folder / "fp32.onnx").write_bytes(b"half"), "must be 7 bytes"),
        (lambda folder: (folder / MANIFEST).write_text("{"), MANIFEST),
        (lambda folder: (folder / MANIFEST).unlink(), MANIFEST),
        (lambda folder: write_manifest(folder, manifest_of(digest="d0")), "belongs to mini/d0"),
        (
            lambda folder: write_manifest(folder, manifest_with(format_version=0)),
            "unsupported format 0; expected 3",
        ),
        (
            lambda folder: write_manifest(folder, manifest_with(file="../out.onnx")),
            "the folder has no file",
        ),
    ],
    ids=[
        "graph-missing",
        "graph-cut",
        "manifest-cut",
        "manifest-missing",
        "of-others",
        "older",
        "outside",
    ],
)
def test_a_broken_artifact_is_ignored_with_a_line(
    artifacts_dir: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], None],
    reason: str,
) -> None:
    spoil(artifacts_dir / "mini" / "d1")
    assert find_artifact(artifacts_dir, "mini", "d1") is None
    assert [record.message for record in caplog.records] == ["artifact ignored"]
    assert reason in vars(caplog.records[0])["reason"]


def manifest_with(*, format_version: int = FORMAT_VERSION, file: str = "fp32.onnx") -> Manifest:
    manifest = manifest_of()
    manifest.format_version = format_version
    manifest.variants[0].file = file
    return manifest


@pytest.mark.parametrize("content", [b"", b"no archive", None], ids=["empty", "noise", "missing"])
def test_a_broken_calibration_set_is_told(artifacts_dir: Path, content: bytes | None) -> None:
    artifact = find_artifact(artifacts_dir, "mini", "d1")
    assert artifact is not None
    path = artifact.folder / CALIBRATION
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=CALIBRATION):
        read_calibration(artifact)


def test_arrays_that_do_not_belong_together_are_told(artifacts_dir: Path) -> None:
    artifact = find_artifact(artifacts_dir, "mini", "d1")
    assert artifact is not None
    write_calibration(artifact.folder, Calibration([text_of(1)], np.eye(2, dtype=np.float32)))
    with pytest.raises(ConfigurationError, match="inconsistent shapes"):
        read_calibration(artifact)


def test_digest_names_files_and_revision(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "config.json").write_text("{}")
    digests = [source_digest(folder, "1"), source_digest(folder, "2")]
    (folder / "README.md").write_text("words")
    (folder / ".cache").write_text("words")
    assert source_digest(folder, "1") == digests[0]
    (folder / "sub" / "config.json").write_text("[]")
    digests.append(source_digest(folder, "1"))
    (folder / "sub" / "config.json").rename(folder / "config.json")
    digests.append(source_digest(folder, "1"))
    (folder / os.fsdecode(b"\xff.json")).write_text("[]")
    digests.append(source_digest(folder, "1"))
    assert len(set(digests)) == 5
    assert all(len(digest) == 16 for digest in digests)
