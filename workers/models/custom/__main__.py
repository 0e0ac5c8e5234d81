"""`python -m workers.models.custom`: what `penstock models`, `init` and `predict` call."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.errors import PenstockError
from workers.models.custom.checking import inspect_folder, is_current, write_interface
from workers.models.custom.starting import start
from workers.models.custom.trial import predict


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status."""
    given = _parser().parse_args(words)
    run: Callable[[argparse.Namespace], None] = given.run
    try:
        run(given)
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
    once.set_defaults(run=lambda given: predict(given.folder, given.input, given.out))
    return parser


def _check(given: argparse.Namespace) -> None:
    if given.if_changed and is_current(given.folder):
        return
    found = inspect_folder(given.folder)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    path = write_interface(given.folder, found.interface)
    names = ", ".join(found.interface.properties) or "none"
    streams = {"": "as a whole", "text": "as a stream of text", "items": "element by element"}
    print(f"{path}: inputs {names}; the output comes {streams[found.interface.streams]}")


def _init(given: argparse.Namespace) -> None:
    folder = start(given.name, Path())
    found = inspect_folder(folder)
    write_interface(folder, found.interface)
    print(f"{folder}/ has a class, its test and its entry. Next:")
    print(f"  penstock predict {folder} -i text='stressed mood'")
    print(f"  PENSTOCK_MODELS_FILE={folder}/models.yaml penstock up")


if __name__ == "__main__":
    sys.exit(main())
