"""A class's view of its folder: every file is readable and writable, but none is changed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.anywhere.launcher import SKIPPED
from tests.limits import START_LIMIT_S
from tests.workers.models.custom.classes import compute, entry_of, output_of, write_class
from tests.workers.models.custom.started import StartedClass
from workers.models.custom import scratch as module
from workers.models.custom.checking import inspect_folder
from workers.models.custom.runner.confinement import abi_version
from workers.models.custom.scratch import Scratch

ROOT = Path(__file__).parents[4]
LAUNCHER = ROOT / "tests" / "anywhere" / "launcher.py"
PENSTOCK = (sys.executable, "-m", "infra.cli.main")
WRITES = """
import pathlib

HERE = pathlib.Path(__file__).parent

class Predictor(BasePredictor):
    def setup(self) -> None:
        (HERE / "weights.bin").write_bytes(b"downloaded")

    def predict(self, places: List[str]) -> dict:
        found = {"here": str(HERE), "cwd": os.getcwd(), "temporary": os.environ["TMPDIR"]}
        for place in places:
            path = HERE / place
            try:
                before = path.read_text()[:20] if path.exists() else None
                path.write_text("written by the class")
                found[place] = [before, path.read_text()]
            except OSError as error:
                found[place] = type(error).__name__
        return found
"""
WRITTEN = "written by the class"


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that no class may write to."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        if Path("/tmp").resolve() in Path(folder).resolve().parents:
            pytest.skip("/var/tmp is below /tmp on this system")
        yield Path(folder)


@pytest.fixture
def folder(outside: Path) -> Path:
    folder = outside / "class"
    for place in (folder / ".cache" / "hub", folder / "assets", outside / "beside"):
        place.mkdir(parents=True)
    write_class(folder, WRITES)
    (folder / "weights.bin").write_bytes(b"shipped")
    (folder / ".cache" / "hub" / "index").write_text("cached")
    (folder / "assets" / "list").write_text("listed")
    (outside / "beside" / "labels").write_text("cat")
    (folder / "linked").symlink_to(outside / "beside")
    (folder / "relative").symlink_to("../beside")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def run_once(folder: Path, places: list[str]) -> Any:
    with StartedClass(entry_of(folder), folder) as model:
        return output_of(compute(model, {"places": places}))


def test_a_class_writes_beside_its_file_and_changes_nothing(folder: Path) -> None:
    before = content(folder.parent)
    contents = {
        "weights.bin": "downloaded",
        ".cache/hub/index": "cached",
        ".cache/hub/new": None,
        "assets/list": "listed",
        "linked/labels": "cat",
        "relative/labels": "cat",
        "relative/new": None,
        "new": None,
    }
    for _ in range(2):  # another process starts with the original folder
        found = run_once(folder, list(contents))
        assert found.pop("temporary")
        assert found.pop("here") == found.pop("cwd")
        assert found == {place: [text, WRITTEN] for place, text in contents.items()}
    assert content(folder.parent) == before


def notes_of(folder: Path) -> list[str]:
    """The notes that `penstock models check` prints about a class that names files in /src."""
    with (folder / "predict.py").open("a") as file:
        file.write("\nOTHER = '/src/other'\n")
    return inspect_folder(folder).notes


@pytest.fixture
def large(folder: Path) -> Path:
    """A file that is too large to copy, unless the disk can share its blocks."""
    path = folder / "assets" / "large"
    path.write_text("x" * (9 * 1024 * 1024))
    return path


def test_large_files_never_change(folder: Path, large: Path) -> None:
    before = large.read_bytes()
    is_read_only = any("assets/large: the class can read it" in one for one in notes_of(folder))
    if is_read_only and not abi_version():
        pytest.skip("this system has no Landlock, so nothing keeps a class from a linked file")
    found = run_once(folder, ["assets/large", "assets/other"])
    assert found["assets/other"] == [None, WRITTEN]
    assert found["assets/large"] == ("PermissionError" if is_read_only else ["x" * 20, WRITTEN])
    assert large.read_bytes() == before


def test_a_class_is_at_src_where_cog_has_it(folder: Path) -> None:
    """If the system does not support mount namespaces, `check` reports that."""
    has_none = any("/src does not exist here" in note for note in notes_of(folder))
    here = run_once(folder, [])["here"]
    assert (here != "/src") == has_none
    if has_none:
        pytest.skip("this system gives classes no /src")


@pytest.mark.parametrize("refused", [["namespaces"], ["namespaces", "landlock"]], ids="-".join)
def test_without_namespaces_the_view_is_in_the_scratch_folder(
    folder: Path, refused: list[str]
) -> None:
    before = content(folder.parent)
    places = ["weights.bin", ".cache/hub/new", "linked/labels", "/src/other"]
    command = ["predict", str(folder), *(f"-iplaces={place}" for place in places)]
    options = json.dumps({"refuses": refused})
    done = subprocess.run(
        [sys.executable, str(LAUNCHER), options, *PENSTOCK, *command],
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
        cwd=ROOT,
    )
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip())
    found = json.loads(done.stdout)
    assert found.pop("temporary")
    assert found.pop("here") == found.pop("cwd") != "/src"
    assert found == {
        "weights.bin": ["downloaded", WRITTEN],
        ".cache/hub/new": [None, WRITTEN],
        "linked/labels": ["cat", WRITTEN],
        "/src/other": "FileNotFoundError",
    }
    assert content(folder.parent) == before


def test_links_in_a_circle_and_to_large_folders_stay_links(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LINKED_ENTRIES", 5)
    folder = outside / "class"
    for place in (folder, outside / "many", outside / "one", outside / "other"):
        place.mkdir()
    for number in range(6):
        (outside / "many" / str(number)).touch()
    (folder / "self").symlink_to(folder)
    (folder / "all").symlink_to("/")
    (folder / "many").symlink_to(outside / "many")
    (folder / "one").symlink_to(outside / "one")
    (outside / "one" / "other").symlink_to(outside / "other")
    (outside / "other" / "one").symlink_to(outside / "one")
    scratch = Scratch(folder)
    try:
        view = scratch.path / "src"
        links = {one for one in ("self", "all", "many", "one") if (view / one).is_symlink()}
        assert links == {"self", "all", "many"}
        assert not (view / "one" / "other").is_symlink()
        assert (view / "one" / "other" / "one").is_symlink()
    finally:
        scratch.close()
