"""`python -m workers.optimize MODEL`: makes and shows variants of a model, writes those that are true to it."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

import msgspec

from shared.catalog import Model as Entry
from shared.catalog import read_catalog
from shared.errors import ConfigurationError, ModelFailed, PenstockError
from shared.settings import WorkerSettings, read_settings
from workers.models.artifact import (
    Artifact,
    Manifest,
    Variant,
    find_artifact,
    new_artifact,
    source_digest,
    take_over,
    write_manifest,
)
from workers.models.cpu import this_cpu
from workers.models.source import resolve
from workers.optimize.options import (
    CALIBRATIONS,
    EMBEDDING_VARIANTS,
    IMAGE_VARIANTS,
    Wishes,
    missing_variants,
    tolerance_of,
    wanted_variants,
)
from workers.optimize.report import Made, verdict_table

_MADE_BY = ("torch", "transformers", "diffusers", "onnx", "onnxruntime", "torchao")


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the artifact that the command line asks for.

    Returns:
        0: it is there, new or from before. 1: nothing was accepted, or something failed. 2: a setting is wrong.
    """
    options = _parser().parse_args(arguments)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _optimize(options)
    except ConfigurationError as error:
        print(f"penstock optimize: {error.message}", file=sys.stderr)
        return 2
    except PenstockError as error:
        print(f"penstock optimize: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("penstock optimize: interrupted; nothing was written", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock optimize", description="Make an optimized artifact of a model.")
    parser.add_argument("model", help="an entry of the catalog")
    parser.add_argument("--models-file", type=Path, metavar="FILE", help="the catalog (default: as the settings say)")
    parser.add_argument("--artifacts-dir", type=Path, metavar="DIR", help="(default: as the settings say)")
    parser.add_argument(
        "--variants",
        default="",
        metavar="NAME,...",
        help=f"embeddings: {', '.join(EMBEDDING_VARIANTS)}; images: {', '.join(IMAGE_VARIANTS)}",
    )
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help="the least cosine (images: PSNR in dB) instead of the catalog's"
    )
    parser.add_argument("--prune", type=_part, default=0.0, metavar="PART", help="cut this part of the inner neurons")
    parser.add_argument("--prune-heads", type=_part, default=0.0, metavar="PART", help="cut this part of the heads")
    parser.add_argument("--calibration", choices=CALIBRATIONS, default="minmax", help="how int8-static takes ranges")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each model (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="make it anew where it is there")
    return parser


def _part(word: str) -> float:
    part = float(word)
    if not 0 <= part < 1:
        raise ValueError(word)
    return part


def _optimize(options: argparse.Namespace) -> int:
    given = {"models_file": options.models_file, "artifacts_dir": options.artifacts_dir}
    settings = read_settings(WorkerSettings, model=options.model, **{k: v for k, v in given.items() if v is not None})
    entry = read_catalog(settings.models_file).find(options.model)
    wishes = Wishes(
        variants=tuple(filter(None, options.variants.split(","))),
        tolerance=options.tolerance,
        prune_neurons=options.prune,
        prune_heads=options.prune_heads,
        calibration=options.calibration,
        threads=options.threads,
    )
    wanted = wanted_variants(entry, wishes)
    folder = resolve(entry.source, entry.revision, settings.models_dir)
    digest = source_digest(folder, entry.revision)
    there = None if options.force else find_artifact(settings.artifacts_dir, entry.name, digest)
    if there is not None:
        wanted = missing_variants(there.manifest, wanted, tolerance_of(entry, wishes))
    if there is not None and not wanted:
        print(_described(there))
        return 0
    _make(entry, folder, settings.artifacts_dir, digest, replace(wishes, variants=wanted), there)
    return 0


def _described(artifact: Artifact) -> str:
    """What is there, in one line."""
    names = ", ".join(f"{variant.name} ({variant.relative_speed:.2f}x)" for variant in artifact.manifest.variants)
    return f"{artifact.folder} is there: {names}; --force makes it anew"


def _make(entry: Entry, folder: Path, artifacts_dir: Path, digest: str, wishes: Wishes, there: Artifact | None) -> None:
    """Makes the artifact, or adds to the one that is there, and shows the table.

    Raises:
        ModelFailed: no variant was accepted and none was there, so nothing was written.
    """
    began_s = time.monotonic()

    def say(words: str) -> None:
        print(f"{time.monotonic() - began_s:6.1f} s  {words}", flush=True)

    with new_artifact(artifacts_dir, entry.name, digest) as draft:
        made = _maker(entry)(entry, folder, draft, wishes, say)
        print(verdict_table(made), flush=True)
        kept = [] if there is None else take_over(there, draft)
        accepted = [verdict.variant for verdict in made.verdicts if verdict.is_accepted]
        refused = [verdict for verdict in made.verdicts if not verdict.is_accepted]
        if not kept and not accepted:
            refusals = "; ".join(f"{verdict.variant.name}: {verdict.refusal}" for verdict in refused)
            raise ModelFailed(f"{entry.name}: no variant was accepted, nothing was written ({refusals})")
        missed = {} if there is None else dict(there.manifest.refused)
        # What could not be made at all has no figures, and may be possible next time.
        missed |= {verdict.variant.name: tolerance_of(entry, wishes) for verdict in refused if verdict.figures}
        for variant in accepted:
            missed.pop(variant.name, None)
        write_manifest(draft, msgspec.structs.replace(_manifest(entry, digest, kept + accepted), refused=missed))
    say(f"wrote {artifacts_dir / entry.name / digest}")


def _maker(entry: Entry) -> Callable[[Entry, Path, Path, Wishes, Callable[[str], None]], Made]:
    # Imported where needed: a run that finds its artifact takes half a second, not the several that torch does.
    if entry.task == "embedding":
        from workers.optimize.embedding import make_embedding_variants

        return make_embedding_variants
    from workers.optimize.image import make_image_variants

    return make_image_variants


def _manifest(entry: Entry, digest: str, variants: list[Variant]) -> Manifest:
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
