"""`python -m workers.models.custom`: what `penstock models`, `init` and `predict` call."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.errors import PenstockError
from shared.model_measurement import FILE_NAME
from workers.models.custom.checking import inspect_folder, is_current, write_interface
from workers.models.custom.environments import python_for
from workers.models.custom.measuring import (
    Conditions,
    measure,
    read_inputs,
    report,
    write_measurement,
)
from workers.models.custom.starting import start
from workers.models.custom.trial import predict


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status."""
    arguments = _parser().parse_args(words)
    run: Callable[[argparse.Namespace], None] = arguments.run
    try:
        run(arguments)
    except PenstockError as error:
        print(f"penstock: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="Models of one's own.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="inspect a class and write its schema.json")
    check.add_argument("folder", type=Path, metavar="FOLDER")
    check.add_argument(
        "--if-changed", action="store_true", help="only if the sources are others than before"
    )
    check.set_defaults(run=_check)
    install = commands.add_parser("install", help="install the packages that a class brings")
    install.add_argument("folder", type=Path, metavar="FOLDER")
    install.set_defaults(run=_install)
    new = commands.add_parser("init", help="write a class, its test and its entry")
    new.add_argument("name", metavar="NAME")
    new.set_defaults(run=_init)
    once = commands.add_parser("predict", help="run a class once, without a stack")
    once.add_argument("folder", type=Path, metavar="FOLDER")
    once.add_argument(
        "-i",
        "--input",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an input; @PATH is a file; may be repeated",
    )
    once.add_argument(
        "-o", "--out", type=Path, default=Path(), metavar="DIR", help="for files of the output"
    )
    once.set_defaults(
        run=lambda arguments: predict(arguments.folder, arguments.input, arguments.out)
    )
    _add_measure(commands)
    return parser


def _add_measure(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    usual = Conditions()
    timed = commands.add_parser("measure", help="time a class, and write its measured.json")
    timed.add_argument("folder", type=Path, metavar="FOLDER")
    inputs = timed.add_mutually_exclusive_group()
    inputs.add_argument(
        "-i",
        "--input",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an input; @PATH is a file; may be repeated",
    )
    inputs.add_argument(
        "--inputs",
        type=Path,
        metavar="FILE",
        help="several: a JSON object of inputs in each line, a file as @PATH",
    )
    timed.add_argument("--repeats", type=_count, default=usual.repeats, metavar="N")
    timed.add_argument(
        "--threads", type=_count, default=usual.threads, metavar="N", help="on a CPU"
    )
    timed.add_argument("--cpu", action="store_true", help="hide the GPUs from the class")
    timed.set_defaults(run=_measure)


def _count(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word}: a whole number from 1 on")
    return number


def _measure(arguments: argparse.Namespace) -> None:
    interface = inspect_folder(arguments.folder).interface
    inputs = read_inputs(interface, arguments.input, arguments.inputs)
    conditions = Conditions(arguments.repeats, arguments.threads, uses_gpu=not arguments.cpu)
    measurement = measure(arguments.folder, interface, inputs, conditions)
    path = arguments.folder.expanduser() / FILE_NAME
    write_measurement(measurement, path)
    print(f"{path}:\n{report(measurement)}")


def _check(arguments: argparse.Namespace) -> None:
    if arguments.if_changed and is_current(arguments.folder):
        python_for(arguments.folder)
        return
    inspected = inspect_folder(arguments.folder)
    for note in inspected.notes:
        print(f"note: {note}", file=sys.stderr)
    path = write_interface(arguments.folder, inspected.interface)
    names = ", ".join(inspected.interface.properties) or "none"
    streams = {"": "as a whole", "text": "as a stream of text", "items": "element by element"}
    comes = "in batches" if inspected.interface.batches else streams[inspected.interface.streams]
    print(f"{path}: inputs {names}; the output comes {comes}")


def _install(arguments: argparse.Namespace) -> None:
    print(f"{arguments.folder}: runs with {python_for(arguments.folder)}")


def _init(arguments: argparse.Namespace) -> None:
    folder = start(arguments.name, Path())
    inspected = inspect_folder(folder)
    write_interface(folder, inspected.interface)
    print(f"{folder}/ has a class, its test and its entry. Next:")
    print(f"  penstock predict {folder} -i text='stressed mood'")
    print(f"  PENSTOCK_MODELS_FILE={folder}/models.yaml penstock up")


if __name__ == "__main__":
    sys.exit(main())
