"""`python -m bench.gpu`: images, texts, a full stack, and time-sharing with CUDA.

Prints a table and writes gpu.json. `--tiny` runs the same code on a CPU in a minute or two, to
check that it works. Those results don't apply to a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from bench.gpu import flux as gpu_flux
from bench.gpu import images as gpu_images
from bench.gpu import requests as gpu_requests
from bench.gpu import served as gpu_served
from bench.gpu import shared as gpu_shared
from bench.gpu import texts as gpu_texts
from bench.gpu.card import card_name, matrix_tflops
from bench.gpu.scale import FULL, TINY, Scale
from bench.report import Figure, Outcome, keep, machine, table
from shared.process.loopback import exempt_loopback_from_proxies

PARTS = (
    "texts",
    "served",
    "served-images",
    "images",
    "requests",
    gpu_flux.FAMILY,
    "shared",
)

_OF_IMAGES = {"served-images", "images", "requests", "shared"}
_WHO = ("plain", "ours")
_OURS = ("bare", "ours, one at a time", "ours")
_PERCENTILES = ("p50", "p95")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 1 if there is no GPU, unless `--tiny` was passed."""
    exempt_loopback_from_proxies()
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        metavar="N",
        help="batch sizes of images",
    )
    parser.add_argument(
        "--parts", choices=PARTS, nargs="+", default=PARTS, help="what to measure (all)"
    )
    parser.add_argument(
        "--compiled",
        type=int,
        metavar="N",
        help="largest compiled batch of images; all powers of two up to it are compiled",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="timed rounds of each (3)")
    options = parser.parse_args(argv)
    if not options.tiny and not torch.cuda.is_available():
        print(
            "no CUDA device on this machine: nothing measured (--tiny runs the same code on the "
            "CPU)"
        )
        return 1
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    scale = TINY if options.tiny else FULL
    scale = replace(
        scale,
        batches=tuple(options.batches or scale.batches),
        compiled=options.compiled or scale.compiled,
        rounds=options.rounds or scale.rounds,
    )
    where, began_s = machine(), time.time()
    where |= {
        "card": card_name(scale.device),
        "cuda": torch.version.cuda or "",
        "diffusers": diffusers.__version__,
    }
    print(f"{where['card']}, torch {where['torch']}, diffusers {where['diffusers']}\n")
    outcome = Outcome([])
    for outcome in run(scale, options.parts):
        if not options.tiny:  # small models on a CPU don't produce meaningful results
            keep("gpu", outcome, where, began_s)
    print(table({"gpu": outcome}))
    return 1 if outcome.failure else 0


def run(scale: Scale, parts: Sequence[str] = PARTS) -> Iterator[Outcome]:
    """Measures `parts` at one scale, with the models in a temporary folder.

    Yields all results so far after each part, because GPU time may run out at any moment. If one
    part fails, the results of the others are kept.
    """
    rate = matrix_tflops(scale.device, scale.precision, scale.matrix)
    figures = [Figure(f"matrix product of {scale.matrix}, {scale.precision}", rate, "TFLOP/s")]
    details: dict[str, Any] = {}
    failures = []
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as name:
        folder = Path(name)
        if not _OF_IMAGES.isdisjoint(parts):
            gpu_images.write_pipeline(folder / "images", scale)
        measures = _measures(scale, folder, rate)
        for part in parts:
            try:
                details[part] = measures[part]()
            except Exception as error:
                traceback.print_exc()
                failures.append(f"{part}: {error}")
            else:
                figures += _FIGURES[part](details[part])
            yield Outcome(figures, details, failure="; ".join(failures))


def _measures(scale: Scale, folder: Path, matrix_rate: float) -> dict[str, Callable[[], Any]]:
    images = folder / "images"
    return {
        "texts": lambda: gpu_texts.measure(scale, folder / "texts"),
        "served": lambda: gpu_served.measure(scale, folder / "served"),
        "served-images": lambda: gpu_served.measure_images(scale, images),
        "images": lambda: gpu_images.measure(scale, images, matrix_rate),
        "requests": lambda: gpu_requests.measure(scale, images, folder / "requests"),
        gpu_flux.FAMILY: lambda: gpu_flux.measure(scale, folder / gpu_flux.FAMILY),
        "shared": lambda: gpu_shared.measure(scale, images, folder / "shared"),
    }


def _text_figures(rows: list[dict[str, Any]]) -> list[Figure]:
    figures = []
    for row in rows:
        label = f"{row['model']}, batches of {row['batch_tokens']} tokens"
        figures += [
            Figure(f"{label}, {name}", row[name], "tokens/s")
            for name in ("plain, first", "plain", "plain without plans", *_OURS)
        ]
        figures += [
            Figure(f"{label}, ours over bare", row["ours"] / row["bare"], "times"),
            Figure(f"{label}, ours over plain", row["ours"] / row["plain without plans"], "times"),
            Figure(f"{label}, lowest cosine", row["cosine"], ""),
        ]
    return figures


def _served_figures(rows: list[dict[str, Any]]) -> list[Figure]:
    figures = []
    for row in rows:
        label = (
            f"served {row['model']}, {row['apis']} APIs and workers, "
            f"{row['per_request']} a request, {row['in_flight']} in flight"
        )
        figures += [
            Figure(label, row["texts_per_s"], "texts/s"),
            *(
                Figure(f"{label}, {name}", row["round_trip_ms"][name], "ms")
                for name in _PERCENTILES
            ),
            *(
                Figure(f"{label}, CPU per text, {name}", value, "ms")
                for name, value in row["cpu_ms"].items()
                if row["apis"] == 1  # of the first processes only
            ),
        ]
    return figures


def _served_image_figures(row: dict[str, Any]) -> list[Figure]:
    label = f"served images, {row['in_flight']} in flight"
    return [
        Figure(f"{label}, the model alone", row["alone_per_s"], "images/s"),
        Figure(f"{label}, through the stack", row["served_per_s"], "images/s"),
        Figure(f"{label}, p50", row["round_trip_ms"]["p50"], "ms"),
        Figure(f"{label}, forked model processes", float(row["is_forked"]), ""),
    ]


def _request_figures(details: dict[str, Any]) -> list[Figure]:
    figures = []
    for row in details["costs"]:
        label = f"four images, {row['kind']}"
        figures.append(Figure(label, row["images_per_s"], "images/s"))
        figures.append(Figure(f"{label}, over none", row["kept"], "times"))
    for precision, apart in details["distances"].items():
        figures += _distance_figures(f"joined, {precision}", apart)
    return figures


def _flow_figures(row: dict[str, Any]) -> list[Figure]:
    figures = []
    for rates in row["rates"]:
        label = f"{row['family']}, batch {rates['batch']}"
        figures += [Figure(f"{label}, {who}", rates[who], "images/s") for who in _WHO]
        figures.append(Figure(f"{label}, ours against plain", rates["ratio"], "times"))
    return [*figures, *_distance_figures(f"joined, {row['family']}", row["distances"])]


def _distance_figures(label: str, apart: dict[str, dict[str, float]]) -> list[Figure]:
    return [
        Figure(f"{label}, {kind}, {extent}", row[extent], "levels")
        for kind, row in apart.items()
        for extent in ("max", "mean")
    ]


def _shared_figures(models: dict[str, dict[str, float]]) -> list[Figure]:
    figures = []
    for name, rates in models.items():
        figures += [
            Figure(f"{name} {way}", rates[way], "batches/s") for way in ("alone", "together")
        ]
        figures.append(Figure(f"{name} kept while sharing", rates["kept"], "of alone"))
    return figures


def _images_figures(rows: list[dict[str, Any]]) -> list[Figure]:
    return [figure for row in rows for figure in _image_figures(row)]


def _image_figures(row: dict[str, Any]) -> list[Figure]:
    label, rates = f"{row['task']}, batch {row['batch']}", row["images_per_s"]
    figures = []
    for who, rate in rates.items():
        figures.append(Figure(f"{label}, {who}", rate, "images/s"))
        figures.append(Figure(f"{label}, {who}", row["of_matrix_rate"][who], "of matrix rate"))
        figures.append(Figure(f"{label}, {who} over plain", rate / rates["plain"], "times"))
    return figures


_FIGURES: dict[str, Callable[[Any], list[Figure]]] = {
    "texts": _text_figures,
    "served": _served_figures,
    "served-images": _served_image_figures,
    "images": _images_figures,
    "requests": _request_figures,
    gpu_flux.FAMILY: _flow_figures,
    "shared": _shared_figures,
}

if __name__ == "__main__":
    sys.exit(main())
