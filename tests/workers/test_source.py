import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import obstore
import pytest
from huggingface_hub import constants
from obstore.store import MemoryStore

from shared.errors import ConfigurationError, Unavailable
from tests.limits import WAIT_LIMIT_S
from workers.models.source import resolve, resolve_file

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def no_bucket(name: str) -> MemoryStore:
    raise AssertionError(f"bucket {name} was opened")


def test_a_package_is_found_without_importing_it(tmp_path: Path) -> None:
    package = tmp_path / "some_weights"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    code = "from pathlib import Path; from workers.models.source import resolve; "
    code += "print(resolve('package:some_weights/model', '1', Path('unused')))"
    path = f"{tmp_path}:{Path.cwd()}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        check=True,
        timeout=WAIT_LIMIT_S,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path},
    )
    assert done.stdout.strip() == str(package / "model")


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve(f"local:{tmp_path}", "1", tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "source",
    [
        "package:no_such_package/model",
        "package:shared/nothing",
        "package:.",
        "local:/no/such/folder",
        "local:~no-such-user/folder",
        "s3://bucket/x",
    ],
)
def test_what_is_not_there_is_refused_by_name(source: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=source):
        resolve(source, "1", tmp_path, open_bucket=no_bucket)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with one repository, and no connection to the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--penstock--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return tmp_path


@pytest.mark.parametrize("revision", ["main", COMMIT])
def test_a_hub_repository_comes_from_the_cache(hub_cache: Path, revision: str) -> None:
    folder = resolve("hf:penstock/tiny", revision, Path("unused"))
    assert folder == hub_cache / "models--penstock--tiny" / "snapshots" / COMMIT


def test_a_hub_repository_out_of_reach_is_unavailable(hub_cache: Path) -> None:
    with pytest.raises(Unavailable, match="penstock/other"):
        resolve("hf:penstock/other", "main", Path("unused"))


def test_a_malformed_hub_name_is_refused(hub_cache: Path) -> None:
    with pytest.raises(ConfigurationError, match="a/b/c"):
        resolve("hf:a/b/c", "main", Path("unused"))


@pytest.fixture
def bucket() -> MemoryStore:
    store = MemoryStore()
    for name in (
        "models/tiny/config.json",
        "models/tiny/unet/weights",
        "models/tiny-2/config.json",
        "other",
    ):
        obstore.put(store, name, name.encode())
    return store


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_bucket_is_copied_once(bucket: MemoryStore, tmp_path: Path) -> None:
    folder = resolve("gs://weights/models/tiny", "3", tmp_path, open_bucket=lambda name: bucket)
    expected = {
        "config.json": b"models/tiny/config.json",
        "unet/weights": b"models/tiny/unet/weights",
    }
    assert files(folder) == expected
    assert resolve("gs://weights/models/tiny", "3", tmp_path, open_bucket=no_bucket) == folder
    assert (
        resolve("gs://weights/models/tiny/", "4", tmp_path, open_bucket=lambda name: bucket)
        != folder
    )


def test_a_file_of_a_bucket_is_copied_once(bucket: MemoryStore, tmp_path: Path) -> None:
    source = "gs://weights/models/tiny/unet/weights"
    file = resolve_file(source, "3", tmp_path, open_bucket=lambda name: bucket)
    assert file.read_bytes() == b"models/tiny/unet/weights"
    assert resolve_file(source, "3", tmp_path, open_bucket=no_bucket) == file
    with pytest.raises(ConfigurationError, match="the object does not exist"):
        resolve_file("gs://weights/none", "3", tmp_path, open_bucket=lambda name: bucket)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


def test_a_file_of_this_machine_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"a")
    file = resolve_file(f"local:{tmp_path}/a.safetensors", "1", tmp_path / "cache")
    assert file.read_bytes() == b"a"
    shipped = resolve_file("package:models/shapes/pipeline/model_index.json", "1", tmp_path)
    assert shipped.is_file()
    with pytest.raises(ConfigurationError, match="is not a file"):
        resolve_file(f"local:{tmp_path}", "1", tmp_path / "cache")


def test_a_copy_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    """A bucket may hold one object below another, but a disk can't, so the copy fails after its
    first file.
    """
    store = MemoryStore()
    for name in ("tiny/a", "tiny/a/b"):
        obstore.put(store, name, b"whole")
    with pytest.raises(Unavailable, match="gs://weights/tiny"):
        resolve("gs://weights/tiny", "1", tmp_path, open_bucket=lambda name: store)
    assert [path for path in tmp_path.rglob("*") if "1" in path.name] == []


def test_a_revision_may_contain_a_slash(bucket: MemoryStore, tmp_path: Path) -> None:
    def open_bucket(name: str) -> MemoryStore:
        return bucket

    folder = resolve("gs://weights/models/tiny", "refs/1", tmp_path, open_bucket=open_bucket)
    assert (folder / "config.json").read_bytes() == b"models/tiny/config.json"
    file = resolve_file("gs://weights/other", "refs/1", tmp_path, open_bucket=open_bucket)
    assert file.read_bytes() == b"other"


@pytest.mark.parametrize("get", [resolve, resolve_file])
def test_a_cache_that_can_not_be_written_is_unavailable(
    bucket: MemoryStore, tmp_path: Path, get: Callable[..., Path]
) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(Unavailable, match="gs://weights/other"):
        get("gs://weights/other", "1", tmp_path / "cache", open_bucket=lambda name: bucket)


def test_an_empty_prefix_is_refused(bucket: MemoryStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="it is empty"):
        resolve("gs://weights/models/none", "1", tmp_path, open_bucket=lambda name: bucket)
