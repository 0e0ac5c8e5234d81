"""`penstock weights prefetch`: copies Hub models into a bucket, once for all workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

weights = typer.Typer(
    help="Copy the weights of hub models into a bucket, for all workers (prefetch).",
    no_args_is_help=True,
)


@weights.command("prefetch")
def prefetch(
    to: Annotated[str, typer.Option(metavar="URL", help="gs://BUCKET or a folder")],
    models_file: Annotated[Path, typer.Option(metavar="FILE", help="the catalog")] = Path(
        "models.yaml"
    ),
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="only this model; may be repeated")
    ] = None,
    again: Annotated[bool, typer.Option(help="replace existing files")] = False,
) -> None:
    """Copy Hub models' weights into a bucket.

    A gated model needs a token, either in HF_TOKEN or in the file specified by HF_TOKEN_PATH.
    """
    from shared.models.catalog_file import read_catalog
    from workers.prefetch import prefetch

    for line in prefetch(read_catalog(models_file), to, model or [], again=again):
        print(line, flush=True)
