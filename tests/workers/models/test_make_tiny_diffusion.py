import hashlib
import subprocess
import sys
from pathlib import Path


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_bytes_each_time(tiny_folder: Path, tmp_path: Path) -> None:
    """From the command line, as the local stack makes it, over what was there before."""
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "old").touch()
    command = [sys.executable, "-m", "workers.models.make_tiny_diffusion", str(folder)]
    subprocess.run(command, check=True, timeout=50)
    assert digests(folder) == digests(tiny_folder)
    assert sum(path.stat().st_size for path in folder.rglob("*.safetensors")) < 8_000_000
    assert list(folder.parent.iterdir()) == [folder]
