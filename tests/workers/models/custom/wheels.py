"""Small packages to install without a network."""

from __future__ import annotations

import zipfile
from pathlib import Path


def make_wheel(folder: Path, name: str, version: str, source: str = "", *, needs: str = "") -> Path:
    """Writes a wheel with one module, which has `version` and what `source` adds.

    `needs`: a requirement of it.

    See https://packaging.python.org/en/latest/specifications/binary-distribution-format/.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n{source}",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    files[record] = "".join(f"{one},,\n" for one in [*files, record])
    with zipfile.ZipFile(path, "w") as archive:
        for one, text in files.items():
            archive.writestr(one, text)
    return path
