"""`python -m workers.optimize MODEL`: builds variants of a model, keeps the faithful ones."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Annotated, cast

import msgspec
import typer
from rich.console import Console

from shared.catalog import Model
from shared.catalog_file import read_catalog
from shared.errors import ConfigurationError, ModelFailed, PenstockError
from shared.settings import WorkerSettings, read_settings
from workers.models.artifact import (
    Artifact,
    Manifest,
    Variant,
    find_artifact,
    locked,
    new_artifact,
    source_digest,
    take_over,
    write_manifest,
)
from workers.models.processors import this_cpu
from workers.models.source import resolve
from workers.optimize.options import (
    Calibration,
    OptimizeOptions,
    missing_variants,
    tolerance_of,
    wanted_variants,
)
from workers.optimize.report import Made, verdict_table, verdicts_as_dict
from workers.tasks import WORKER_TASKS

Maker = Callable[[Model, Path, Path, OptimizeOptions, Callable[[str], None]], Made]
"""Makes and judges variants: of an entry and its folder, into a folder."""
_MADE_BY = ("torch", "transformers", "diffusers", "onnx", "onnxruntime", "torchao")


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the artifact that the command line asks for.

    Returns:
        0: it is there, new or from before. 1: nothing was accepted, or something failed. 2: a
            setting is wrong.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        app(arguments, prog_name="penstock optimize")
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _part(word: str) -> float:
    part = float(word)
    if not 0 <= part < 1:
        raise ValueError(f"{word} is not between 0 and 1")
    return part


@app.command()
def optimize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="an entry of the catalog")],
    models_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the catalog (default: as the settings say)")
    ] = None,
    artifacts_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="(default: as the settings say)")
    ] = None,
    variants: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="; ".join(
                f"{name}: {', '.join(task.variants)}" for name, task in WORKER_TASKS.items()
            ),
        ),
    ] = "",
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="minimum cosine (images: PSNR in dB), instead of the catalog's"
        ),
    ] = None,
    prune: Annotated[
        float, typer.Option(parser=_part, metavar="PART", help="cut this part of the inner neurons")
    ] = 0.0,
    prune_heads: Annotated[
        float, typer.Option(parser=_part, metavar="PART", help="cut this part of the heads")
    ] = 0.0,
    calibration: Annotated[
        Calibration, typer.Option(help="how int8-static finds its ranges")
    ] = "minmax",
    threads: Annotated[int, typer.Option(metavar="N", help="of each model")] = 1,
    force: Annotated[bool, typer.Option("--force", help="make it again if it exists")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the verdicts as JSON; progress goes to stderr")
    ] = False,
) -> None:
    """Make an optimized artifact of a model, and judge it first."""
    options = OptimizeOptions(
        variants=tuple(filter(None, variants.split(","))),
        tolerance=tolerance,
        prune_neurons=prune,
        prune_heads=prune_heads,
        calibration=calibration,
        threads=threads,
    )
    paths = {"models_file": models_file, "artifacts_dir": artifacts_dir}
    try:
        settings = read_settings(
            WorkerSettings, model=model, **{k: v for k, v in paths.items() if v is not None}
        )
        _optimize(settings, options, Output(as_json=as_json), force=force)
    except PenstockError as error:
        typer.echo(f"penstock optimize: {error.message}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigurationError) else 1) from error
    except KeyboardInterrupt:
        typer.echo("penstock optimize: interrupted; nothing was written", err=True)
        raise typer.Exit(130) from None


class Output:
    """Prints what happens and what came of it, for a person or for a program."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._began_s = time.monotonic()

    def say(self, words: str) -> None:
        """Prints a step, with the seconds since the start."""
        typer.echo(f"{time.monotonic() - self._began_s:6.1f} s  {words}", err=self._as_json)

    def show_found(self, artifact: Artifact) -> None:
        """Prints an artifact that exists already."""
        if self._as_json:
            verdicts = [
                {"variant": one.name, "relative_speed": one.relative_speed}
                for one in artifact.manifest.variants
            ]
            typer.echo(
                json.dumps(
                    {"folder": str(artifact.folder), "made": [], "found": verdicts}, indent=2
                )
            )
        else:
            typer.echo(_described(artifact))

    def show_made(self, optimized: Made, folder: Path) -> None:
        """Prints the verdict on each variant that was tried."""
        if self._as_json:
            typer.echo(json.dumps({"folder": str(folder)} | verdicts_as_dict(optimized), indent=2))
        else:
            typer.echo(verdict_table(optimized))


def _optimize(
    settings: WorkerSettings, options: OptimizeOptions, output: Output, *, force: bool
) -> None:
    entry = read_catalog(settings.models_file).find(settings.model)
    wanted = wanted_variants(entry, options)
    folder = resolve(
        entry.source, entry.revision, settings.models_dir, weights_dir=settings.weights_dir
    )
    digest = source_digest(folder, entry.revision)
    target = settings.artifacts_dir / entry.name / digest

    def look() -> tuple[Artifact | None, tuple[str, ...]]:
        there = None if force else find_artifact(settings.artifacts_dir, entry.name, digest)
        if there is None:
            return None, wanted
        return there, missing_variants(there.manifest, wanted, tolerance_of(entry, options))

    there, missing = look()
    if there is not None and not missing:
        output.show_found(there)
        return
    # Several stacks may start at once on a new machine. One makes it, the others find it.
    with locked(settings.artifacts_dir / f"making-{digest}.lock"):
        there, missing = look()
        if there is not None and not missing:
            output.show_found(there)
        else:
            _make(entry, folder, target, replace(options, variants=missing), there, output)


def _described(artifact: Artifact) -> str:
    names = ", ".join(
        f"{variant.name} ({variant.relative_speed:.2f}x)" for variant in artifact.manifest.variants
    )
    return f"{artifact.folder} is there: {names}; --force makes it again"


def _make(
    entry: Model,
    source: Path,
    target: Path,
    options: OptimizeOptions,
    there: Artifact | None,
    output: Output,
) -> None:
    """Makes the artifact, or adds to the one that is there, and shows the table.

    Raises:
        ModelFailed: no variant was accepted and none was there, so nothing was written.
    """
    digest = target.name
    with new_artifact(target.parents[1], entry.name, digest) as draft:
        with Console(stderr=True).status(f"optimizing {entry.name}"):
            optimized = _maker(entry)(entry, source, draft, options, output.say)
        output.show_made(optimized, target)
        kept = [] if there is None else take_over(there, draft)
        accepted = [verdict.variant for verdict in optimized.verdicts if verdict.is_accepted]
        refused = [verdict for verdict in optimized.verdicts if not verdict.is_accepted]
        if not kept and not accepted:
            refusals = "; ".join(
                f"{verdict.variant.name}: {verdict.refusal}" for verdict in refused
            )
            raise ModelFailed(
                f"{entry.name}: no variant was accepted, nothing was written ({refusals})"
            )
        missed = {} if there is None else dict(there.manifest.refused)
        # What could not be made at all has no figures, and may be possible next time.
        missed |= {
            verdict.variant.name: tolerance_of(entry, options)
            for verdict in refused
            if verdict.figures
        }
        for variant in accepted:
            missed.pop(variant.name, None)
        write_manifest(
            draft,
            msgspec.structs.replace(_manifest(entry, digest, kept + accepted), refused=missed),
        )
    output.say(f"wrote {target}")


def _maker(entry: Model) -> Maker:
    # Imported where needed: a run that finds its artifact takes half a second, not the several
    # that torch does.
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
        measured_on=this_cpu()[1],
        task=entry.task,
        variants=variants,
    )


def _interrupt(number: int, frame: FrameType | None) -> None:
    # Unwinds the stack, so that the draft is removed.
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
