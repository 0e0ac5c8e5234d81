"""`penstock models`, `init`, and `predict`: custom classes, image models, and text models."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from infra.cli.withdrawals import list_withdrawn, withdraw

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="the folder of the class")]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "-i", "--input", metavar="NAME=VALUE", help="an input; @PATH is a file; may be repeated"
    ),
]

models = typer.Typer(help="Custom models and withdrawals.", no_args_is_help=True)
models.command("withdraw")(withdraw)
models.command("withdrawn")(list_withdrawn)


@models.command("install")
def install(folder: Folder) -> None:
    """Install a class's packages, as `check` and workers do."""
    from workers.models.custom.environments import python_for

    print(f"{folder}: runs with {python_for(folder)}")


@models.command("check")
def check(
    model: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|NAME",
            help="the folder of a class, or the name of an image or text model",
        ),
    ],
    if_changed: Annotated[
        bool,
        typer.Option(
            "--if-changed",
            help="for a class: skip it unless its sources have changed since the last check",
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(metavar="NAME", help="for an image or text model: auto, cpu, cuda or cuda:N"),
    ] = "auto",
) -> None:
    """Try a model (FOLDER of a class, or NAME of an image or text model).

    Writes the inputs that a class or an image model accepts, and shows how much memory a text model
    takes.
    """
    folder = Path(model)
    if folder.is_dir():
        if device != "auto":
            raise typer.BadParameter(f"{model} is a folder", param_hint="--device")
        from workers.models.custom.checking import check_class

        lines = check_class(folder, only_if_changed=if_changed)
    else:
        if if_changed:
            raise typer.BadParameter(f"{model} is not a folder", param_hint="--if-changed")
        lines = _check_entry(model, device)
    for line in lines:
        print(line, flush=True)


def _check_entry(name: str, device: str) -> Iterator[str]:
    from shared.models.catalog_file import is_text_entry
    from shared.settings import ModelSettings, read_settings

    # Otherwise transformers warns about a package that image models don't need.
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    # The printed lines contain what these libraries log, and an error names its cause.
    for package in ("workers.models", "workers.runtime"):
        logging.getLogger(package).addHandler(logging.NullHandler())
    if is_text_entry(read_settings(ModelSettings).models_file, name):
        from workers.runtime.text_check import check_text_model

        return check_text_model(name, device)
    from workers.models.image.checking import check_model

    return check_model(name, device)


@models.command("measure")
def measure(
    folder: Folder,
    assignments: Inputs = None,
    inputs_file: Annotated[
        Path | None,
        typer.Option(
            "--inputs",
            metavar="FILE",
            help="file with one JSON object of inputs per line; write files as @PATH",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="runs per batch")] = 5,
    threads: Annotated[
        int, typer.Option(min=1, metavar="N", help="number of threads when running on a CPU")
    ] = 1,
    cpu: Annotated[bool, typer.Option("--cpu", help="hide the GPUs from the class")] = False,
) -> None:
    """Time a folder's class, for `penstock deploy plan` (FOLDER -i NAME=VALUE)."""
    if assignments and inputs_file is not None:
        raise typer.BadParameter("-i and --inputs are mutually exclusive")
    from workers.models.custom.checking import show_inspection
    from workers.models.custom.measuring import (
        Conditions,
        measure,
        read_inputs,
        report,
        write_measurement,
    )

    interface = show_inspection(folder)
    inputs = read_inputs(interface, assignments or [], inputs_file)
    conditions = Conditions(repeats, threads, uses_gpu=not cpu)
    measurement = measure(folder, interface, inputs, conditions)
    path = write_measurement(folder, measurement)
    print(f"{path}:\n{report(measurement)}")


def init(name: Annotated[str, typer.Argument(metavar="NAME", help="model name")]) -> None:
    """Write a working custom model: a class, its test, and its entry (NAME)."""
    from workers.models.custom.checking import inspect_folder, write_interface
    from workers.models.custom.sample import write_sample

    folder = write_sample(name, Path())
    write_interface(folder, inspect_folder(folder).interface)
    print(f"{folder}/ now contains a class, its test and its catalog entry. Next:")
    print(f"  penstock predict {folder} -i text='stressed mood'")
    print(f"  PENSTOCK_MODELS_FILE={folder}/models.yaml penstock up")


def predict(
    folder: Folder,
    assignments: Inputs = None,
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="PATH",
            help="folder for output files, or file for the output",
        ),
    ] = Path(),
) -> None:
    """Run a custom model once, without a stack (FOLDER -i NAME=VALUE)."""
    from workers.models.custom.trial import predict

    predict(folder, assignments or [], out)
