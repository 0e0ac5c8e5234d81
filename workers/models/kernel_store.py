"""Compiled kernels that outlive their worker, with one archive per model and environment.

Inductor, Triton, and the CUDA driver store compiled kernels in separate folders, as thousands of
small files that they rename and lock. A mounted bucket handles many small files poorly, but one
large file well. For that reason, a new worker unpacks the archive before loading the model, and
repacks it if the warm-up compiled more kernels. A different GPU, driver, or torch version uses a
different archive. Kernels are looked up by their computation, so an outdated archive is useless at
worst.

A process that can write an archive can run code in the workers that read it. Each model therefore
has a separate folder, which only its own workers may write to
(infra/terraform/platform/storage.tf).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import platform
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from shared.models.kubernetes_names import slug

MAX_BYTES = 512 * 1024 * 1024
"""Maximum total size of an archive's files.

SD 1.5 with four batch sizes compiles to a fraction of this size.
"""
_NOT_KEPT = ("locks", "tmp")
"""Folders whose files belong to a single process."""
_FOLDERS = {"triton": "TRITON_CACHE_DIR", "cuda": "CUDA_CACHE_PATH"}
"""Folders in addition to Inductor's, each with the environment variable that contains its path.

If the variable is missing, Triton's folder is inside Inductor's, and the driver's folder is not
saved.
"""

log = logging.getLogger(__name__)


def kernel_key(device: torch.device) -> str:
    """Returns a key for everything that compiled kernels depend on: GPU or CPU, driver, and torch.

    The torch version determines the Triton and CUDA versions.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        major, minor = torch.cuda.get_device_capability(device)
        parts = [name, f"sm{major}{minor}", f"driver-{_driver()}"]
    else:
        parts = [_cpu(), torch.backends.cpu.get_cpu_capability(), platform.libc_ver()[1]]
    parts.append(f"torch-{torch.__version__}")
    return "-".join(re.sub(r"[^A-Za-z0-9.+-]+", "_", part).strip("_") for part in parts)


def _driver() -> str:
    """Returns the version of the NVIDIA driver.

    If the version is unknown, kernels are stored under CUDA's version.
    """
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        text = ""
    version = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return version[0] if version else f"cuda-{torch.version.cuda}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


class KernelStore:
    """One model's archive for the device it runs on.

    Args:
        folder: the archives' folder. If None, nothing is unpacked or packed.
        device: the device its kernels are compiled for.
        max_bytes: maximum total size of the archive's files.
    """

    def __init__(
        self,
        folder: Path | None,
        model: str,
        device: torch.device,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._max_bytes = max_bytes
        self._archive = folder and folder / slug(model) / f"{kernel_key(device)}.tar"
        self._restored: frozenset[str] = frozenset()

    def restore(self) -> int:
        """Unpacks the kernels from an earlier worker.

        Never fails, because any missing kernels are compiled.
        """
        if self._archive is None:
            return 0
        try:
            with tarfile.open(self._archive) as archive:
                self._restored = frozenset(self._unpack(archive))
        except FileNotFoundError:
            return 0
        except (OSError, EOFError, ArithmeticError, ValueError, tarfile.TarError) as error:
            log.warning("compiled kernels can't be read; compiling", extra={"error": str(error)})
            return 0
        log.info("compiled kernels restored", extra={"files": len(self._restored)})
        return len(self._restored)

    def _unpack(self, archive: tarfile.TarFile) -> Iterator[str]:
        folders, left_bytes = _folders(), self._max_bytes
        for member in archive:
            top, _, rest = member.name.partition("/")
            left_bytes -= member.size
            if top not in folders or not _is_below(rest) or not member.isfile() or left_bytes < 0:
                continue
            path = folders[top] / rest
            path.parent.mkdir(parents=True, exist_ok=True)
            # Checked manually, because tarfile has no filters before Python 3.11.4, and Debian 12's
            # Python is older.
            with archive.extractfile(member) or io.BytesIO() as packed, path.open("wb") as file:
                shutil.copyfileobj(packed, file)
            path.chmod(0o755 if member.mode & 0o100 else 0o644)
            os.utime(path, (member.mtime, member.mtime))
            yield member.name

    def keep(self) -> bool:
        """Packs the compiled kernels, if there are more than were unpacked. Never fails.

        If the total is too large, only this worker's own kernels are kept.

        Returns:
            True if an archive was written.
        """
        if self._archive is None:
            return False
        try:
            files = self._choose_files()
            if not files:
                return False
            _write_archive(self._archive, files)
        except (OSError, ValueError, tarfile.TarError) as error:
            log.warning("compiled kernels can't be saved", extra={"error": str(error)})
            return False
        log.info("compiled kernels saved", extra={"files": len(files)})
        return True

    def _choose_files(self) -> dict[str, Path]:
        """Returns the files to pack, by name. Empty if there are none, or too many bytes."""
        files = dict(_files())
        fresh = {name: path for name, path in files.items() if name not in self._restored}
        if not fresh:
            return {}
        for chosen in (files, fresh):
            if sum(path.stat().st_size for path in chosen.values()) <= self._max_bytes:
                return chosen
        log.warning("compiled kernels are too large to save", extra={"max_bytes": self._max_bytes})
        return {}


def _write_archive(path: Path, files: dict[str, Path]) -> None:
    # In a bucket, the complete object appears when the file is closed.
    part = path.with_name(f"{path.name}.{platform.node()}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(part, "w") as archive:
            for name, file in files.items():
                archive.add(file, name, recursive=False)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _is_below(name: str) -> bool:
    """Returns whether a path in an archive stays inside its folder."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts


def _folders() -> dict[str, Path]:
    """Returns the folders of compiled kernels, keyed by their names in the archive."""
    others = {
        name: Path(os.environ[variable])
        for name, variable in _FOLDERS.items()
        if os.environ.get(variable)
    }
    return {"inductor": Path(cache_dir()), **others}


def _files() -> Iterator[tuple[str, Path]]:
    """Yields the files in all folders, each with its name in the archive."""
    for name, folder in _folders().items():
        for path in sorted(folder.rglob("*")):
            below = path.relative_to(folder)
            if path.is_file() and not path.is_symlink() and below.parts[0] not in _NOT_KEPT:
                yield str(PurePosixPath(name, *below.parts)), path
