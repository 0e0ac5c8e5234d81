"""Small packages that can be installed without a network."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    source: str = "",
    *,
    needs: str = "",
    scripts: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Writes a wheel with one module that has `version` and the code in `source`.

    `needs`: one of its requirements. `scripts`: functions in the module, keyed by the commands that
    call them.

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
    if scripts:
        lines = [f"{command} = {name}:{function}\n" for command, function in scripts.items()]
        files[f"{info}/entry_points.txt"] = "".join(["[console_scripts]\n", *lines])
    record = f"{info}/RECORD"
    files[record] = "".join(f"{one},,\n" for one in [*files, record])
    with zipfile.ZipFile(path, "w") as archive:
        for one, text in files.items():
            archive.writestr(one, text)
    return path
