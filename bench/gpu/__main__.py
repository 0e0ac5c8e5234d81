"""`python -m bench.gpu`: images, embeddings and time-sharing on a CUDA machine.

Prints a table and writes gpu.json. `--tiny` runs the same code on a CPU in under a minute, as a
check that it runs: its figures say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from bench.gpu import images as gpu_images
from bench.gpu import shared as gpu_shared
from bench.gpu import texts as gpu_texts
from bench.gpu.card import card_name, matrix_tflops
from bench.gpu.scale import FULL, TINY, Scale
from bench.report import Figure, Outcome, keep, machine, table


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it. Returns 1 without a GPU, unless `--tiny` was given."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
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
    outcome = run(scale)
    print(f"{where['card']}, torch {where['torch']}, diffusers {where['diffusers']}\n")
    print(table({"gpu": outcome}))
    if not options.tiny:  # figures of small models on a CPU are not results
        print(f"\nkept in {keep('gpu', outcome, where, began_s)}")
    return 0


def run(scale: Scale) -> Outcome:
    """Measures everything at one scale, with the models in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as name:
        folder = Path(name)
        rate = matrix_tflops(scale.device, scale.precision, scale.matrix)
        images = gpu_images.measure(scale, folder / "images", rate)
        texts = gpu_texts.measure(scale, folder / "texts")
        shared = gpu_shared.measure(scale, folder / "images")
    figures = [Figure(f"matrix product of {scale.matrix}, {scale.precision}", rate, "TFLOP/s")]
    for row in images:
        figures += _image_figures(row)
    for row in texts:
        names = [name for name in row if name.startswith(("plain", "ours"))]
        figures += [
            Figure(f"{row['model']}, {row['length']} tokens, {name}", row[name], "tokens/s")
            for name in names
        ]
    for name, rates in shared.items():
        figures += [
            Figure(f"{name} {way}", rates[way], "batches/s") for way in ("alone", "together")
        ]
        figures.append(Figure(f"{name} kept while sharing", rates["kept"], "of alone"))
    return Outcome(figures, {"images": images, "texts": texts, "shared": shared})


def _image_figures(row: dict[str, Any]) -> list[Figure]:
    label = f"{row['task']}, batch {row['batch']}"
    figures = []
    for who in ("plain", "ours"):
        one = row[who]
        figures.append(Figure(f"{label}, {who}", one["seconds_per_image"], "s/image"))
        figures.append(Figure(f"{label}, {who}", one["images_per_s"], "images/s"))
        figures.append(Figure(f"{label}, {who}", one["tflops"], "TFLOP/s"))
        figures.append(Figure(f"{label}, {who}", one["of_matrix_rate"], "of matrix rate"))
    return [*figures, Figure(f"{label}, ours against plain", row["ratio"], "times")]


if __name__ == "__main__":
    sys.exit(main())
