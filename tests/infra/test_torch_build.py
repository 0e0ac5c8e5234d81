"""The torch build chosen by `make setup`, and what `penstock doctor` reports about it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU_BUILD = "uv pip install --python {venv}/bin/python --torch-backend cpu --no-deps torch==2.13.0"
DEFAULT_BUILD = "pip install --disable-pip-version-check --no-compile --no-deps torch==2.13.0"


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def installed(tmp_path: Path, *, config: str = "", has_driver: bool = False, uv: int = 0) -> str:
    """The commands that install torch, with this pip configuration and uv exit status."""
    venv, said = tmp_path / "venv", tmp_path / "said"
    pip = f'if [ "$1" = config ]; then echo "{config}"; else echo "pip $*" >> {said}; fi'
    program(venv / "bin/pip", pip)
    program(venv / "bin/uv", f'echo "uv $*" >> {said}; exit {uv}')
    if has_driver:
        program(tmp_path / "tools/nvidia-smi", "exit 0")
    path = f"{tmp_path}/tools:/usr/bin:/bin"
    subprocess.run(
        [ROOT / "infra/install_torch.sh", venv, "torch==2.13.0"],
        check=True,
        capture_output=True,
        env={"PATH": path},
    )
    return said.read_text().replace(str(venv), "{venv}")


needs_no_driver = pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists() or sys.platform != "linux",
    reason="this machine has an NVIDIA driver, or is not Linux",
)


@needs_no_driver
def test_without_a_driver_the_build_for_cpus_is_taken(tmp_path: Path) -> None:
    assert installed(tmp_path) == f"{CPU_BUILD}\n"


@needs_no_driver
def test_what_pip_gives_is_taken_if_that_index_is_out_of_reach(tmp_path: Path) -> None:
    assert installed(tmp_path, uv=1) == f"{CPU_BUILD}\n{DEFAULT_BUILD}\n"


@pytest.mark.parametrize("config", ["global.index-url='https://…'", "global.find-links='/wheels'"])
def test_configured_indexes_decide(tmp_path: Path, config: str) -> None:
    assert installed(tmp_path, config=config) == f"{DEFAULT_BUILD}\n"


def test_with_a_driver_the_build_with_cuda_is_taken(tmp_path: Path) -> None:
    assert installed(tmp_path, has_driver=True) == f"{DEFAULT_BUILD}\n"


@pytest.mark.parametrize(
    ("version", "cuda", "said"),
    [
        ("2.13.0+cpu", "cuda: Optional[str] = None", "2.13.0+cpu, built for CPUs"),
        ("2.13.0", "cuda: Optional[str] = '13.0'", "2.13.0, built for CUDA 13.0"),
        ("2.13.0", "cuda = None", "2.13.0, built for CPUs"),
    ],
)
def test_doctor_says_for_what_torch_is_built(
    tmp_path: Path, version: str, cuda: str, said: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text(f"__version__ = {version!r}\n{cuda}\nhip = None\n")
    (tmp_path / f"torch-{version}.dist-info").mkdir()
    metadata = tmp_path / f"torch-{version}.dist-info/METADATA"
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    reported = subprocess.run(
        [sys.executable, "-m", "infra.cli.main", "doctor"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    [line] = [one for one in reported.stdout.splitlines() if " torch " in one]
    assert line.endswith(said)
