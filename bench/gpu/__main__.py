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
from collections.abc import Iterator, Sequence
from pathlib import Path

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

PARTS = ("texts", "served", "served-images", "images", "flux", "requests", "shared")

_OF_IMAGES = {"served-images", "images", "requests", "shared"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 1 if there is no GPU, unless `--tiny` was passed."""
    exempt_loopback_from_proxies()
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument(
        "--parts", choices=PARTS, nargs="+", default=PARTS, help="what to measure (all)"
    )
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

    Yields all results so far after each part, because GPU time may run out at any moment. If a part
    fails, all figures measured until then are kept.
    """
    rate = matrix_tflops(scale.device, scale.precision, scale.matrix)
    figures = [Figure(f"matrix product of {scale.matrix}, {scale.precision}", rate, "TFLOP/s")]
    failures = []
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as name:
        folder = Path(name)
        if not _OF_IMAGES.isdisjoint(parts):
            gpu_images.write_pipeline(folder / "images", scale)
        measures = _measures(scale, folder, rate)
        for part in parts:
            try:
                for figure in measures[part]:
                    figures.append(figure)
                    print(f"{figure.name}: {figure.value:g} {figure.unit}", flush=True)
            except Exception as error:
                traceback.print_exc()
                failures.append(f"{part}: {error}")
            yield Outcome(figures, failure="; ".join(failures))


def _measures(scale: Scale, folder: Path, matrix_rate: float) -> dict[str, Iterator[Figure]]:
    images = folder / "images"
    return {
        "texts": gpu_texts.measure(scale, folder / "texts"),
        "served": gpu_served.measure(scale, folder / "served"),
        "served-images": gpu_served.measure_images(scale, images),
        "images": gpu_images.measure(scale, images, matrix_rate),
        "flux": gpu_flux.measure(scale, folder / "flux"),
        "requests": gpu_requests.measure(scale, images, folder / "requests"),
        "shared": gpu_shared.measure(scale, images, folder / "shared"),
    }


if __name__ == "__main__":
    sys.exit(main())
