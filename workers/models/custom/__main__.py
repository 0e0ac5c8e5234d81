"""`python -m workers.models.custom`: what `penstock models`, `init` and `predict` call."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.errors import ConfigurationError, PenstockError
from shared.model_interface import ModelInterface
from shared.model_measurement import MEASUREMENT_FILE, read_measurement
from workers.models.custom.checking import (
    inspect_folder,
    is_current,
    show_inspection,
    write_interface,
)
from workers.models.custom.environments import python_for
from workers.models.custom.measuring import (
    Conditions,
    measure,
    read_inputs,
    report,
    write_measurement,
)
from workers.models.custom.trial import predict

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{2,63}")
_CLASS = '''"""A custom model. `penstock models check .` writes what it takes and gives."""

from cog import BasePredictor, ConcatenateIterator, Input


class Predictor(BasePredictor):
    """Says each word of a text backward."""

    def setup(self) -> None:
        """Runs once in each process: load weights here."""
        self.separator = " "

    def predict(
        self,
        text: str = Input(description="The text to turn around.", min_length=1),
        repeat: int = Input(description="How often it is said.", default=1, ge=1, le=10),
    ) -> ConcatenateIterator[str]:
        """Each word is sent as soon as it is yielded."""
        for _ in range(repeat):
            for word in text.split():
                yield word[::-1] + self.separator
'''
_TEST = '''"""The class by itself: python -m pytest test_predict.py"""

from predict import Predictor


def test_each_word_is_turned_around() -> None:
    predictor = Predictor()
    predictor.setup()
    assert "".join(predictor.predict(text="stressed mood", repeat=1)) == "desserts doom "
'''
_ENTRY = """models:
  - name: {name}
    task: custom
    source: local:{folder}
    price: {{per_item_usd: 0.001}}
"""


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
    parser = argparse.ArgumentParser(prog="penstock", description="Custom models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="inspect a class and write its penstock.schema.json",
        epilog="NAME of an image model instead of FOLDER: tries that model (`check NAME -h`).",
    )
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
        "-o",
        "--out",
        type=Path,
        default=Path(),
        metavar="PATH",
        help="a folder for the files of the output, or the file to write the output to",
    )
    once.set_defaults(
        run=lambda arguments: predict(arguments.folder, arguments.input, arguments.out)
    )
    _add_measure(commands)
    return parser


def _add_measure(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    usual = Conditions()
    timed = commands.add_parser(
        "measure", help="time a class, and write its penstock.measured.json"
    )
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
    interface = show_inspection(arguments.folder)
    inputs = read_inputs(interface, arguments.input, arguments.inputs)
    conditions = Conditions(arguments.repeats, arguments.threads, uses_gpu=not arguments.cpu)
    measurement = measure(arguments.folder, interface, inputs, conditions)
    path = write_measurement(arguments.folder, measurement)
    print(f"{path}:\n{report(measurement)}")


def _check(arguments: argparse.Namespace) -> None:
    if arguments.if_changed and is_current(arguments.folder):
        python_for(arguments.folder)
        return
    interface = show_inspection(arguments.folder)
    path = write_interface(arguments.folder, interface)
    names = ", ".join(interface.properties) or "none"
    streams = {"": "as a whole", "text": "as a stream of text", "items": "element by element"}
    comes = "in batches" if interface.batches else streams[interface.streams]
    print(f"{path}: inputs {names}; the output comes {comes}")
    print(_capacity(arguments.folder.expanduser(), interface))


def _capacity(folder: Path, interface: ModelInterface) -> str:
    """How many predictions a process computes at a time, and the memory that this takes."""
    many = f"up to {interface.concurrency} predictions at a time (concurrency.max)"
    count = "batches, by default of up to 64 items" if interface.batches else many
    if not interface.batches and interface.concurrency == 1:
        return "each process computes one prediction at a time"
    memory = f"to find out how much memory this takes: penstock models measure {folder}"
    with contextlib.suppress(ConfigurationError):
        measured = read_measurement(MEASUREMENT_FILE.find(folder))
        if measured.sources_sha256 == interface.sources_sha256:
            peak_mib = measured.peak_memory_bytes / 2**20
            memory = f"with {max(measured.batches)} at a time it took {peak_mib:,.0f} MiB of memory"
    return f"each process computes {count}; batch.max_items in the entry changes that; {memory}"


def _install(arguments: argparse.Namespace) -> None:
    print(f"{arguments.folder}: runs with {python_for(arguments.folder)}")


def _init(arguments: argparse.Namespace) -> None:
    folder = _start(arguments.name, Path())
    inspected = inspect_folder(folder)
    write_interface(folder, inspected.interface)
    print(f"{folder}/ has a class, its test and its entry. Next:")
    print(f"  penstock predict {folder} -i text='stressed mood'")
    print(f"  PENSTOCK_MODELS_FILE={folder}/models.yaml penstock up")


def _start(name: str, parent: Path) -> Path:
    """Writes a new folder `name` with predict.py, test_predict.py and models.yaml.

    Args:
        name: of the folder and of the model.
        parent: the folder it is made in.

    Returns:
        The new folder.

    Raises:
        ConfigurationError: the name is not one of a model, or the folder is there.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name[:80]!r} is no name of a model: 3 to 64 letters, digits, '_' and '-', "
            "beginning with a letter"
        )
    folder = parent / name
    try:
        folder.mkdir()
        (folder / "predict.py").write_text(_CLASS, encoding="utf-8")
        (folder / "test_predict.py").write_text(_TEST, encoding="utf-8")
        entry = _ENTRY.format(name=name, folder=folder.resolve())
        (folder / "models.yaml").write_text(entry, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{folder}: {error.strerror}") from error
    return folder


if __name__ == "__main__":
    sys.exit(main())
