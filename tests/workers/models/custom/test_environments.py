"""Packages that only one class needs: installed once, isolated from our packages and other classes'
packages.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cog
import pytest

from shared.errors import ConfigurationError
from tests.limits import START_LIMIT_S
from tests.workers.models.custom.classes import compute, entry_of, output_of, write_class
from tests.workers.models.custom.started import StartedClass
from tests.workers.models.custom.wheels import make_wheel
from workers.models.custom.checking import inspect_folder
from workers.models.custom.environments import python_for

pytestmark = pytest.mark.slow(about_s=40)
VERSIONS = """
class Predictor(BasePredictor):
    def predict(self, name: str) -> dict:
        import importlib, importlib.metadata
        names = sorted(one.metadata["Name"] for one in importlib.metadata.distributions())
        return {"version": importlib.import_module(name).version, "all": names}
"""
ROOT = Path(__file__).parents[4]
INSTALL = (sys.executable, "-m", "workers.models.custom", "install")


@pytest.fixture(autouse=True)
def environments_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for this test's environments. uv's downloads are shared."""
    monkeypatch.setenv("PENSTOCK_ENVIRONMENTS_DIR", str(tmp_path / "environments"))
    if "UV_CACHE_DIR" not in os.environ:
        monkeypatch.setenv("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv"))
    return tmp_path / "environments"


def class_with(folder: Path, requirements: str, cog_yaml: str = "", body: str = VERSIONS) -> Path:
    folder.mkdir(exist_ok=True)
    if requirements:
        (folder / "requirements.txt").write_text(requirements)
    return write_class(folder, body, cog_yaml)


def run_once(folder: Path, **given: Any) -> Any:
    with StartedClass(entry_of(folder), folder) as model:
        return output_of(compute(model, given))


def whole(environments_dir: Path) -> list[str]:
    return [one.name for one in environments_dir.iterdir() if (one / "bin").is_dir()]


def test_two_classes_have_two_versions_and_nothing_of_ours(
    tmp_path: Path, environments_dir: Path
) -> None:
    for number in ("1.0", "2.0"):
        make_wheel(tmp_path / "wheels", "told", number)
    links = f"--find-links {tmp_path}/wheels\n"
    first = class_with(tmp_path / "first", f"{links}told==1.0\n")
    second = class_with(tmp_path / "second", "", "build:\n  python_requirements: needs/all.txt\n")
    (second / "needs").mkdir()
    (second / "needs" / "all.txt").write_text("-r more.txt\n# a comment\n")
    (second / "needs" / "more.txt").write_text(f"{links}told>=2\n")
    found = [run_once(folder, name="told") for folder in (first, second)]
    assert [one["version"] for one in found] == ["1.0", "2.0"]
    for one in found:
        assert {"cog", "told"} <= set(one["all"])
        assert not {"torch", "numpy", "penstock", "redis"} & set(one["all"])
    assert len(whole(environments_dir)) == 2


def test_a_folder_is_named_from_where_one_is(
    tmp_path: Path, environments_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path / "wheels", "told", "1.0")
    class_with(tmp_path / "one", f"--find-links {tmp_path}/wheels\ntold==1.0\n")
    monkeypatch.chdir(tmp_path)
    assert Path(python_for(Path("one"))).exists()
    assert len(whole(environments_dir)) == 1


def test_overrides_leave_out_what_a_package_asks_for(
    tmp_path: Path, environments_dir: Path
) -> None:
    make_wheel(tmp_path / "wheels", "extra", "1.0")
    make_wheel(tmp_path / "wheels", "told", "1.0", needs="extra")
    folder = class_with(tmp_path / "one", f"--find-links {tmp_path}/wheels\ntold==1.0\n")
    assert {"extra", "told"} <= set(run_once(folder, name="told")["all"])
    (folder / "overrides.txt").write_text('extra; sys_platform == "never"\n')
    found = run_once(folder, name="told")
    assert "extra" not in found["all"]
    assert found["version"] == "1.0"
    assert len(whole(environments_dir)) == 2


def test_a_class_without_requirements_runs_with_ours(
    tmp_path: Path, environments_dir: Path
) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self) -> dict:
            import numpy
            return {"prefix": sys.prefix, "numpy": numpy.__version__}
    """
    for number, requirements in enumerate(("", "# none\n\n")):
        folder = class_with(tmp_path / f"plain-{number}", requirements, body=body)
        assert run_once(folder) == {"prefix": sys.prefix, "numpy": version("numpy")}
    assert not environments_dir.exists()


def test_it_is_made_once_for_equal_requirements_and_anew_for_others(
    tmp_path: Path, environments_dir: Path
) -> None:
    for number in ("1.0", "1.1"):
        make_wheel(tmp_path / "wheels", "told", number)
    text = f"--find-links {tmp_path}/wheels\ntold==1.0\n"
    one, other = class_with(tmp_path / "one", text), class_with(tmp_path / "other", text)
    first = python_for(one)
    made_ns = Path(first).lstat().st_mtime_ns
    assert python_for(other) == first
    assert Path(first).lstat().st_mtime_ns == made_ns
    (other / "requirements.txt").write_text(text.replace("1.0", "1.1"))
    assert python_for(other) != first


def test_two_at_once_make_it_once(tmp_path: Path, environments_dir: Path) -> None:
    make_wheel(tmp_path / "wheels", "told", "1.0")
    folder = class_with(tmp_path / "one", f"--find-links {tmp_path}/wheels\ntold==1.0\n")
    with ThreadPoolExecutor() as threads:
        running = [
            threads.submit(
                subprocess.run, [*INSTALL, str(folder)], capture_output=True, text=True, cwd=ROOT
            )
            for _ in range(3)
        ]
        done = [one.result(START_LIMIT_S) for one in running]
    assert [one.returncode for one in done] == [0, 0, 0], done
    assert len({one.stdout for one in done}) == 1
    assert sum("installing" in one.stderr for one in done) == 1


def test_one_that_was_killed_leaves_nothing_half(tmp_path: Path, environments_dir: Path) -> None:
    folder = class_with(tmp_path / "one", slow_package(tmp_path))
    with subprocess.Popen([*INSTALL, str(folder)], cwd=ROOT, start_new_session=True) as process:
        while not list(environments_dir.glob(".*-*")):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    assert not whole(environments_dir)
    assert list(environments_dir.glob(".*-*"))
    (tmp_path / "go-on").touch()
    assert run_once(folder, name="slow")["version"] == "1.0"
    assert not list(environments_dir.glob(".*-*")), "what was left is removed"


def slow_package(tmp_path: Path) -> str:
    """A package that is built from source and waits for a file."""
    setup = f"""
import pathlib, time
from setuptools import setup
while not pathlib.Path({str(tmp_path / "go-on")!r}).exists():
    time.sleep(0.01)
setup(name="slow", version="1.0", py_modules=["slow"])
"""
    source = tmp_path / "slow-1.0"
    source.mkdir()
    (source / "setup.py").write_text(setup)
    (source / "slow.py").write_text("version = '1.0'\n")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 1.0\n")
    wheels = tmp_path / "wheels"
    wheels.mkdir(exist_ok=True)
    with tarfile.open(wheels / "slow-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, "slow-1.0")
    return f"--find-links {wheels}\nslow==1.0\n"


@pytest.mark.parametrize(
    ("requirements", "cog_yaml", "reason"),
    [
        ("idna==0.0.999\n", "", "no version of idna==0.0.999"),
        ("-e ./lib\n", "", "paths can't be installed"),
        ("../elsewhere\n", "", "paths can't be installed"),
        ("told @ file:///tmp/x\n", "", "paths can't be installed"),
        ("-r missing.txt\n", "", "missing.txt: No such file"),
        ("", "build:\n  python_requirements: ../all.txt\n", "is not a file in the folder"),
        ("", "build:\n  python_packages: told\n", "build.python_packages: must be a list"),
        (
            "",
            "build:\n  python_packages: [told]\n  python_requirements: r.txt\n",
            "mutually exclusive",
        ),
    ],
)
def test_what_can_t_be_installed_is_named(
    tmp_path: Path, environments_dir: Path, requirements: str, cog_yaml: str, reason: str
) -> None:
    folder = class_with(tmp_path / "one", requirements, cog_yaml)
    with pytest.raises(ConfigurationError, match=reason) as caught:
        inspect_folder(folder)
    assert caught.value.field == "source"


def test_a_requirement_for_another_cog_has_no_effect(
    tmp_path: Path, environments_dir: Path
) -> None:
    make_wheel(tmp_path / "wheels", "told", "1.0")
    links = f"--find-links {tmp_path}/wheels\n"
    folder = class_with(tmp_path / "one", f"{links}told==1.0\ncog==0.9.0  # as on Replicate\n")
    notes = inspect_folder(folder).notes
    assert notes == [f"cog==0.9.0 has no effect here: the class runs with cog=={cog.__version__}"]
    assert run_once(folder, name="told")["version"] == "1.0"


def test_a_python_that_is_not_here_is_named(tmp_path: Path, environments_dir: Path) -> None:
    folder = class_with(tmp_path / "one", "", "build:\n  python_version: '3.99'\n  cuda: '12'\n")
    notes = inspect_folder(folder).notes
    assert any("build.python_version 3.99 has no effect here" in note for note in notes), notes
    assert any("build.cuda has no effect here" in note for note in notes), notes


def test_a_python_with_a_null_character_is_not_here(tmp_path: Path, environments_dir: Path) -> None:
    make_wheel(tmp_path / "wheels", "told", "1.0")
    links = f"--find-links {tmp_path}/wheels\n"
    cog_yaml = 'build:\n  python_version: "3.9\\0"\n'
    folder = class_with(tmp_path / "one", f"{links}told==1.0\n", cog_yaml)
    notes = inspect_folder(folder).notes
    assert any("build.python_version 3.9\0 has no effect here" in note for note in notes), notes


def test_code_that_builds_a_package_sees_no_key_and_writes_nowhere_else(
    tmp_path: Path, environments_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://:told-secret@127.0.0.1:1/0")
    monkeypatch.setenv("SOME_API_KEY", "told-secret")
    source = slow_package(tmp_path)
    (tmp_path / "go-on").touch()
    setup = tmp_path / "slow-1.0" / "setup.py"
    setup.write_text(
        f"""
import os, pathlib
from setuptools import setup
found = sorted(name for name in os.environ if "told-secret" in os.environ[name])
try:
    pathlib.Path({str(tmp_path / "written")!r}).write_text("x")
    found.append("written")
except OSError:
    pass
pathlib.Path("slow.py").write_text(f"version = {{found!r}}")
setup(name="slow", version="1.0", py_modules=["slow"])
"""
    )
    with tarfile.open(tmp_path / "wheels" / "slow-1.0.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "slow-1.0", "slow-1.0")
    assert run_once(class_with(tmp_path / "one", source), name="slow")["version"] == []


def test_a_machine_that_has_no_room_for_it_is_named(tmp_path: Path, environments_dir: Path) -> None:
    environments_dir.write_text("in the way")
    folder = class_with(tmp_path / "one", "told==1.0\n")
    with pytest.raises(ConfigurationError, match=r"PENSTOCK_ENVIRONMENTS_DIR.*classes=DIR"):
        python_for(folder)
