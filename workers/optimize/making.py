"""Creates a model's artifact: builds variants, and keeps those within the tolerance."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

import msgspec
from rich.console import Console

from shared.errors import ModelFailed
from shared.models.catalog import Model
from shared.models.catalog_file import read_catalog
from shared.settings import WorkerSettings
from workers.models.artifact import (
    Artifact,
    Manifest,
    Variant,
    find_artifact,
    lock_file,
    new_artifact,
    source_digest,
    take_over,
    write_manifest,
)
from workers.models.processors import detect_cpu
from workers.models.source import resolve
from workers.optimize.options import (
    OptimizeOptions,
    choose_variants,
    missing_variants,
    tolerance_of,
)
from workers.optimize.report import Made, Verdict, verdict_table, verdicts_as_dict
from workers.tasks import WORKER_TASKS

Maker = Callable[[Model, Path, Path, OptimizeOptions, Callable[[str], None]], Made]
"""Creates and evaluates an entry's variants, given the entry, its folder, and the target folder."""
_MADE_BY = ("torch", "transformers", "diffusers", "onnx", "onnxruntime", "torchao")


class Output:
    """Prints progress and results, for a person or a program."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._began_s = time.monotonic()

    def say(self, words: str) -> None:
        """Prints a step along with the seconds since the start."""
        stream = sys.stderr if self._as_json else sys.stdout
        print(f"{time.monotonic() - self._began_s:6.1f} s  {words}", file=stream, flush=True)

    def show_found(self, artifact: Artifact) -> None:
        if self._as_json:
            verdicts = [
                {"variant": variant.name, "relative_speed": variant.relative_speed}
                for variant in artifact.manifest.variants
            ]
            facts = {"folder": str(artifact.folder), "made": [], "found": verdicts}
            print(json.dumps(facts, indent=2))
        else:
            print(_describe(artifact))

    def show_made(self, optimized: Made, folder: Path) -> None:
        """Prints the verdict on each variant that was tried."""
        if self._as_json:
            print(json.dumps({"folder": str(folder)} | verdicts_as_dict(optimized), indent=2))
        else:
            print(verdict_table(optimized))


def make_artifact(
    settings: WorkerSettings, options: OptimizeOptions, output: Output, *, force: bool
) -> None:
    """Creates the variants that the artifact of `settings.model` lacks, and shows the verdicts.

    Raises:
        ConfigurationError: a setting or an option is invalid.
        ModelFailed: no variant was accepted, so nothing was written.
    """
    entry = read_catalog(settings.models_file).find(settings.model)
    wanted = choose_variants(entry, options)
    folder = resolve(
        entry.source, entry.revision, settings.models_dir, weights_dir=settings.weights_dir
    )
    digest = source_digest(folder, entry.revision)
    target = settings.artifacts_dir / entry.name / digest

    def look() -> tuple[Artifact | None, tuple[str, ...]]:
        existing = None if force else find_artifact(settings.artifacts_dir, entry.name, digest)
        if existing is None:
            return None, wanted
        return existing, missing_variants(existing.manifest, wanted, tolerance_of(entry, options))

    existing, missing = look()
    if existing is not None and not missing:
        output.show_found(existing)
        return
    # Several stacks may start at once on a new machine. One of them creates the artifact for all of
    # them.
    with lock_file(settings.artifacts_dir / f"making-{digest}.lock"):
        existing, missing = look()
        if existing is not None and not missing:
            output.show_found(existing)
        else:
            _make(entry, folder, target, replace(options, variants=missing), existing, output)


def _describe(artifact: Artifact) -> str:
    names = ", ".join(
        f"{variant.name} ({variant.relative_speed:.2f}x)" for variant in artifact.manifest.variants
    )
    return f"{artifact.folder} already exists: {names}; use --force to create it again"


def _make(
    entry: Model,
    source: Path,
    target: Path,
    options: OptimizeOptions,
    existing: Artifact | None,
    output: Output,
) -> None:
    """Creates the artifact or adds to the existing one, and shows the table.

    Raises:
        ModelFailed: no variant was accepted and none existed, so nothing was written.
    """
    digest = target.name
    with new_artifact(target.parents[1], entry.name, digest) as draft:
        with Console(stderr=True).status(f"optimizing {entry.name}"):
            optimized = _maker(entry)(entry, source, draft, options, output.say)
        output.show_made(optimized, target)
        reused = [] if existing is None else take_over(existing, draft)
        accepted = [verdict.variant for verdict in optimized.verdicts if verdict.is_accepted]
        if not reused and not accepted:
            refusals = "; ".join(
                f"{verdict.variant.name}: {verdict.refusal}" for verdict in optimized.verdicts
            )
            raise ModelFailed(
                f"{entry.name}: no variant was accepted, so nothing was written ({refusals})"
            )
        manifest = _manifest(entry, digest, reused + accepted)
        refused = _list_refused(existing, optimized.verdicts, tolerance_of(entry, options))
        write_manifest(draft, msgspec.structs.replace(manifest, refused=refused))
    output.say(f"wrote {target}")


def _list_refused(
    existing: Artifact | None, verdicts: Sequence[Verdict], tolerance: float
) -> dict[str, float]:
    """Returns the tolerance that each rejected variant missed, now or in the existing artifact."""
    refused = {} if existing is None else dict(existing.manifest.refused)
    for verdict in verdicts:
        if verdict.is_accepted:
            refused.pop(verdict.variant.name, None)
        elif verdict.figures:  # a variant without results may be possible next time
            refused[verdict.variant.name] = tolerance
    return refused


def _maker(entry: Model) -> Maker:
    # Imported only where needed, because a run that finds its artifact takes half a second, rather
    # than the several seconds it takes to import torch.
    module = import_module(f"workers.optimize.{WORKER_TASKS[entry.task].optimizer}")
    return cast(Maker, module.make_variants)


def _manifest(entry: Model, digest: str, variants: list[Variant]) -> Manifest:
    made_by = {}
    for package in _MADE_BY:
        try:
            made_by[package] = version(package)
        except PackageNotFoundError:
            continue
    return Manifest(
        model=entry.name,
        revision=entry.revision,
        source_digest=digest,
        made_by=made_by,
        measured_on=detect_cpu().flags,
        task=entry.task,
        variants=variants,
    )
