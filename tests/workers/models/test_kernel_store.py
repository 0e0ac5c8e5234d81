"""Kernels compiled by one worker are available when the next worker starts with an empty disk."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.limits import START_LIMIT_S
from workers.models.kernel_store import KernelStore, kernel_key

# Otherwise, every process in a quick run would import torch just for this file.
pytestmark = pytest.mark.slow(about_s=30)

CPU = torch.device("cpu")
WORKER = """
import json, sys
import torch
from torch._dynamo.utils import counters
from pathlib import Path
from workers.models.kernel_store import KernelStore

store = KernelStore(Path(sys.argv[1]), "SD 1.5", torch.device("cpu"))
restored = store.restore()
torch.compile(torch.mm)(torch.ones(3, 4), torch.ones(4, 5))
kept = store.keep()
found = counters["inductor"]
print(json.dumps([bool(restored), found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], kept]))
"""


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A pod's folders, which are empty when it starts."""
    return new_disk(monkeypatch, tmp_path / "first")


def new_disk(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
    monkeypatch.setenv("CUDA_CACHE_PATH", str(folder / "cuda"))
    return folder


def compiled(folder: Path, *names: str, size: int = 10) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode().ljust(size, b"."))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_second_worker_reads_what_the_first_compiled(tmp_path: Path) -> None:
    """Two processes use the same paths, on a disk that is empty when the second one starts."""
    found: list[Any] = []
    for number in range(3):
        done = subprocess.run(
            [sys.executable, "-c", WORKER, str(tmp_path / "mount")],
            env={
                "PATH": "/usr/bin:/bin",
                "PYTHONPATH": str(Path.cwd()),
                "HOME": str(tmp_path),
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "disk"),
            },
            capture_output=True,
            text=True,
            timeout=START_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
        (tmp_path / "disk").rename(tmp_path / f"disk-of-{number}")
    first, second, third = found
    assert first == [False, 0, 1, True]
    # Found, not compiled. A worker that finds everything in the store writes nothing new.
    assert second == third == [True, 1, 0, False]
    assert len(files(tmp_path / "mount")) == 1


def test_all_folders_come_back_as_they_were(
    disk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ("inductor/fxgraph/a/b", "triton/x.cubin", "cuda/0/index")
    compiled(disk, *names, "inductor/locks/one.lock", "inductor/tmp/half")
    mount = tmp_path / "mount"
    assert KernelStore(mount, "SD 1.5", CPU).keep()
    second = new_disk(monkeypatch, tmp_path / "second")
    store = KernelStore(mount, "SD 1.5", CPU)
    assert store.restore() == 3
    assert files(second) == sorted(names)
    assert all((second / name).read_bytes() == (disk / name).read_bytes() for name in names)
    assert not store.keep(), "nothing is new"
    compiled(second, "triton/y.cubin")
    assert store.keep()
    new_disk(monkeypatch, tmp_path / "third")
    assert KernelStore(mount, "SD 1.5", CPU).restore() == 4


def test_each_model_device_driver_and_torch_has_an_archive(
    disk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled(disk, "inductor/a")
    mount = tmp_path / "mount"
    KernelStore(mount, "SD 1.5", CPU).keep()
    (archive,) = files(mount)
    assert archive == f"sd-1-5/{kernel_key(CPU)}.tar"
    assert f"torch-{torch.__version__}" in archive
    assert KernelStore(mount, "SDXL", CPU).restore() == 0
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "get_device_name", lambda device: "NVIDIA L4")
    monkeypatch.setattr(cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr("workers.models.kernel_store._driver", lambda: "580.65.06")
    gpu = torch.device("cuda")
    assert kernel_key(gpu) == f"NVIDIA_L4-sm89-driver-580.65.06-torch-{torch.__version__}"
    assert KernelStore(mount, "SD 1.5", gpu).restore() == 0
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert KernelStore(mount, "SD 1.5", CPU).restore() == 0


def test_what_is_kept_is_bounded(
    disk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled(disk, "inductor/a", "inductor/b", size=400)
    mount = tmp_path / "mount"
    assert KernelStore(mount, "m", CPU, max_bytes=1000).keep()
    second = new_disk(monkeypatch, tmp_path / "second")
    store = KernelStore(mount, "m", CPU, max_bytes=1000)
    store.restore()
    compiled(second, "inductor/c", size=400)
    assert store.keep()
    third = new_disk(monkeypatch, tmp_path / "third")
    assert KernelStore(mount, "m", CPU, max_bytes=1000).restore() == 1
    assert files(third) == ["inductor/c"], "what is older and too much goes"
    compiled(third, "inductor/d", size=2000)
    assert not KernelStore(mount, "m", CPU, max_bytes=1000).keep()


@pytest.mark.parametrize(
    "name",
    ["inductor/../../outside", "inductor//{}/outside", "/outside", "other/file", "inductor/"],
)
def test_an_archive_writes_nowhere_else(disk: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "mount" / "m" / f"{kernel_key(CPU)}.tar"
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo(name.format(tmp_path))
        member.size = 3
        archive.addfile(member, io.BytesIO(b"bad"))
    assert KernelStore(tmp_path / "mount", "m", CPU).restore() == 0
    assert files(disk) == []
    assert not (tmp_path / "outside").exists()


def test_a_file_that_vanishes_ends_nothing(
    disk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A compiler renames its files while the store lists them."""
    compiled(disk, "inductor/a", "inductor/b")
    listed: set[str] = set()
    stat = Path.stat

    def look(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        listed.add(path.name)
        if path.name == "a" and "b" in listed:
            (disk / "inductor/b").unlink(missing_ok=True)
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", look)
    assert not KernelStore(tmp_path / "mount", "m", CPU).keep()


def test_an_archive_with_a_time_that_no_file_can_have_is_not_read(
    disk: Path, tmp_path: Path
) -> None:
    path = tmp_path / "mount" / "m" / f"{kernel_key(CPU)}.tar"
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("inductor/a")
        member.pax_headers = {"mtime": "1e300"}
        archive.addfile(member)
    assert KernelStore(tmp_path / "mount", "m", CPU).restore() == 0


def test_what_can_not_be_read_or_written_is_compiled(disk: Path, tmp_path: Path) -> None:
    compiled(disk, "inductor/a")
    mount = tmp_path / "mount"
    path = mount / "m" / f"{kernel_key(CPU)}.tar"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half an archive")
    store = KernelStore(mount, "m", CPU)
    assert store.restore() == 0
    assert store.keep(), "replaced"
    path.write_bytes(gzip.compress(bytes(10_000))[:20])
    assert store.restore() == 0
    (tmp_path / "file").touch()
    assert not KernelStore(tmp_path / "file", "m", CPU).keep()
    nowhere = KernelStore(None, "m", CPU)
    assert (nowhere.restore(), nowhere.keep()) == (0, False)
