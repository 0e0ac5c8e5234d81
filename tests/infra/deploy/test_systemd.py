"""The units: sound by systemd's own check, hardened, and in agreement with code."""

from __future__ import annotations

import re
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from shared.settings import ApiSettings, Settings, WorkerSettings
from tests.infra.deploy.dockerfiles import run
from workers.functions.settings import FunctionSettings

FOLDER = Path("infra/systemd")
COMMON = FOLDER / "penstock-.service.d/common.conf"
BIN = "/opt/penstock/.venv/bin/"
MAX_EXPOSURE = 25
"""At most 100, by `systemd-analyze security`. Without common.conf it is 90 to 95."""
UNITS = sorted(path.name for path in FOLDER.glob("penstock-*.service"))
KINDS: Mapping[str, type[Settings]] = {
    "penstock-api.service": ApiSettings,
    "penstock-batches.service": ApiSettings,
    "penstock-functions.service": FunctionSettings,
    "penstock-provision.service": ApiSettings,
    "penstock-worker@.service": WorkerSettings,
}


def text_of(unit: str) -> str:
    return (FOLDER / unit).read_text(encoding="utf-8")


def instance(unit: str) -> str:
    """The name of a unit that can be started."""
    return unit.replace("@.", "@mini.")


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units, with programs that are there."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    folder = tmp_path / "units"
    shutil.copytree(FOLDER, folder)
    program = tmp_path / "bin/any"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    for unit in UNITS:
        command = re.sub(rf"{BIN}\w+", str(program), text_of(unit))
        (folder / unit).write_text(command, encoding="utf-8")
    return folder


def test_systemd_finds_nothing_wrong(units: Path) -> None:
    timers = [path.name for path in FOLDER.glob("*.timer")]
    names = ["penstock.target", *timers, *map(instance, UNITS)]
    done = run("systemd-analyze", "verify", "--man=no", *names, SYSTEMD_UNIT_PATH=f"{units}:")
    said = [line for line in (done.stdout + done.stderr).splitlines() if "penstock" in line]
    assert said == []


@pytest.mark.parametrize("unit", UNITS)
def test_unit_is_hardened(units: Path, unit: str) -> None:
    done = run(
        *("systemd-analyze", "security", "--offline=true", f"--threshold={MAX_EXPOSURE}"),
        instance(unit),
        SYSTEMD_UNIT_PATH=f"{units}:",
    )
    assert done.returncode == 0, done.stdout


def test_all_parts_have_a_unit() -> None:
    assert [unit.removeprefix("penstock-").partition(".")[0] for unit in UNITS] == [
        *("anomalies", "api", "batches", "bigquery", "functions", "provision", "pubsub"),
        *("reports", "worker@"),
    ]


def test_reports_are_made_on_time() -> None:
    timers = {path.stem: path.read_text("utf-8") for path in FOLDER.glob("*.timer")}
    assert set(timers) == {"penstock-anomalies", "penstock-reports"}
    for name, timer in timers.items():
        assert f"{name}.timer" in text_of("penstock.target")
        assert f"{name}.service" in UNITS
        assert "Persistent=yes" in timer


@pytest.mark.slow(about_s=7)
@pytest.mark.parametrize("unit", UNITS)
def test_command_is_one_of_ours(unit: str) -> None:
    (command,) = re.findall(r"(?m)^ExecStart=(.*)$", text_of(unit))
    program, *words = command.removeprefix(BIN).split()
    if program == "penstock":
        reported = run(Path(sys.executable).parent / "penstock", words[0], "--help")
        assert reported.returncode == 0, reported.stderr
        for option in (word for word in words if word.startswith("--")):
            assert option in reported.stdout
    else:
        assert (program, words[:2]) == ("python", ["-m", "functions_framework"])
        source = Path(words[words.index("--source") + 1].removeprefix("/opt/penstock/"))
        assert "async def functions(" in source.read_text(encoding="utf-8")


@pytest.mark.parametrize(("unit", "kind"), KINDS.items())
def test_settings_are_known_and_accepted(
    monkeypatch: pytest.MonkeyPatch, unit: str, kind: type[Settings]
) -> None:
    given = dict(re.findall(r"(?m)^(\w+)=(.*)$", (FOLDER / "penstock.env").read_text("utf-8")))
    own = dict(re.findall(r"\b(PENSTOCK_\w+)=(\S+)", text_of(unit)))
    known = {
        f"PENSTOCK_{field.upper()}"
        for one in (ApiSettings, FunctionSettings, WorkerSettings)
        for field in one.model_fields
    }
    for variable, value in (given | own).items():
        assert variable in known or variable == "HF_HOME", variable
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("PENSTOCK_MODEL", "mini")
    kind()


def test_everything_is_written_where_it_may_be() -> None:
    common = COMMON.read_text(encoding="utf-8")
    assert "ProtectSystem=strict" in common
    assert "StateDirectory=penstock" in common
    text = (FOLDER / "penstock.env").read_text("utf-8") + "".join(map(text_of, UNITS))
    for variable, path in re.findall(r"\b(\w+_DIR|HF_HOME|--data-dir)[= ](\S+)", text):
        assert path.startswith(("/var/lib/penstock/", "/var/cache/penstock/")), variable
        if path.startswith("/var/cache"):
            assert "CacheDirectory=penstock" in text_of("penstock-worker@.service")


def test_api_without_keys_is_not_an_example() -> None:
    text = (FOLDER / "penstock.env").read_text("utf-8")
    assert re.search(r"(?m)^PENSTOCK_KEYS_URL=file:///\S+$", text)
    assert "PENSTOCK_HOST=" not in text
