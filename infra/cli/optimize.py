"""`penstock optimize`: creates an optimized artifact for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from infra.amounts import check_amount
from shared.errors import ConfigurationError, PenstockError

VARIANTS = (
    "embedding: fp32, int8, int8-static, fp16, pruned; image: tuned, bf16, int8, compiled; "
    "similarity: fp32, int8, int8-static, fp16, pruned"
)
"""Variants by task, for the help text. A test compares them to the tasks."""


def _part(word: str) -> float:
    part = float(word)
    if not 0 <= part < 1:
        raise ValueError(f"must be between 0 and 1, got {word}")
    return part


def optimize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="name of a model in the catalog")],
    models_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="catalog file (default: from the settings)")
    ] = None,
    artifacts_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="folder for artifacts (default: from the settings)"),
    ] = None,
    variants: Annotated[str, typer.Option(metavar="NAME,...", help=VARIANTS)] = "",
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            callback=check_amount,
            help="minimum cosine similarity (for images: PSNR in dB); overrides the catalog's",
        ),
    ] = None,
    prune: Annotated[
        float, typer.Option(parser=_part, metavar="PART", help="fraction of inner neurons to prune")
    ] = 0.0,
    prune_heads: Annotated[
        float,
        typer.Option(parser=_part, metavar="PART", help="fraction of attention heads to prune"),
    ] = 0.0,
    calibration: Annotated[
        Literal["minmax", "entropy", "percentile"],
        typer.Option(help="how int8-static picks its ranges"),
    ] = "minmax",
    threads: Annotated[int, typer.Option(metavar="N", help="threads per model")] = 1,
    force: Annotated[
        bool, typer.Option("--force", help="recreate the artifact if it exists")
    ] = False,
    device: Annotated[
        bool,
        typer.Option("--device", help="only measure the model on this device, for `deploy plan`"),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the verdicts as JSON; progress goes to stderr")
    ] = False,
) -> None:
    """Create an optimized artifact for a model, after evaluating it."""
    from shared.settings import WorkerSettings, read_settings
    from workers.optimize.making import Output, make_artifact
    from workers.optimize.options import OptimizeOptions

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
        output = Output(as_json=as_json)
        if device:
            from workers.autotune.device_profiling import profile_device

            output.say(f"wrote {profile_device(settings, output.say)}")
        else:
            make_artifact(settings, options, output, force=force)
    except PenstockError as error:
        typer.echo(f"penstock optimize: {error.message}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigurationError) else 1) from error
    except KeyboardInterrupt:
        typer.echo("penstock optimize: interrupted; nothing was written", err=True)
        raise typer.Exit(130) from None
