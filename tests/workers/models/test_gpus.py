from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from workers.models.gpus import VARIABLE, count_gpus, gpu_name, gpu_variables
from workers.runtime.pool import assign_devices

INFORMATION = """\
Model: \t\t NVIDIA {name}
IRQ:   \t\t 42
GPU UUID: \t GPU-{number}
"""


@pytest.fixture(autouse=True)
def nothing_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """A folder like /dev on a machine with four GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    for number, name in enumerate(("L4", "L5")):
        folder = tmp_path / f"0000:00:0{4 + number}.0"
        folder.mkdir()
        (folder / "information").write_text(INFORMATION.format(name=name, number=number))
    return tmp_path


@pytest.mark.parametrize(
    ("listed", "count"),
    [
        *(("0", 1), ("2,3", 2), ("GPU-a,GPU-b", 2), ("MIG-a", 1)),
        *(("", 0), ("-1", 0), ("NoDevFiles", 1), ("1,-1,2", 1), ("0,9,1", 1), ("0, 1", 2)),
    ],
)
def test_only_listed_gpus_count(
    devices: Path, monkeypatch: pytest.MonkeyPatch, listed: str, count: int
) -> None:
    assert count_gpus(devices) == 4
    monkeypatch.setenv(VARIABLE, listed)
    assert count_gpus(devices) == count


def test_a_machine_without_device_files_has_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    assert count_gpus(tmp_path) == 0


def test_a_process_sees_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_variables("cpu") == gpu_variables("cuda") == {}
    assert gpu_variables("cuda:1") == {VARIABLE: "1"}
    assert gpu_variables("cuda:2", 2) == {VARIABLE: "2,3"}
    monkeypatch.setenv(VARIABLE, "6,GPU-7")
    assert gpu_variables("cuda:1") == {VARIABLE: "GPU-7"}
    assert gpu_variables("cuda:0", 2) == {VARIABLE: "6,GPU-7"}


def test_a_gpu_has_its_drivers_name(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [gpu_name(device, driver) for device in ("cpu", "auto", "cuda", "cuda:1", "cuda:2")]
    assert names == ["cpu", "cpu", "NVIDIA L4", "NVIDIA L5", "cuda:2"]
    for listed in ("1", "GPU-1"):
        monkeypatch.setenv(VARIABLE, listed)
        assert gpu_name("cuda:0", driver) == "NVIDIA L5"


def test_places_are_spread_over_the_gpus() -> None:
    assert assign_devices("auto", 0, 1, 2) == ["cuda:0", "cuda:1"]
    assert assign_devices("cuda", 3, 1, 2) == ["cuda:0", "cuda:1", "cuda:0"]
    assert assign_devices("cuda", 0, 1, 5, 2) == ["cuda:0", "cuda:2"]
    assert assign_devices("cuda", 1, 1, 4, 4) == ["cuda:0"]
    assert assign_devices("auto", 2, 1, 0, 4) == ["cpu", "cpu"]
    assert assign_devices("cuda:1", 0, 1, 2) == ["cuda:1"]
    with pytest.raises(ConfigurationError, match=r"gpu\.count: 4 exceeds the number of GPUs"):
        assign_devices("cuda", 1, 1, 2, 4)
