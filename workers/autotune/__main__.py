"""`python -m workers.autotune`: measures and saves a choice, and prints it as JSON.

Started by workers/autotune/client.py. A lock ensures that only one process at a time measures on
this machine. A process that waited for the lock finds the choice that the other process saved.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from shared.errors import ConfigurationError
from shared.logs import configure_logs
from shared.models.catalog import Model
from workers.autotune.choice import Choice, Refusal, TuningSettings, read_choice, write_choice
from workers.autotune.client import choice_path
from workers.autotune.hardware import detect_machine
from workers.autotune.search import CALIBRATION_TEXTS, SearchSpec, choose
from workers.models.artifact import find_artifact, lock_file
from workers.models.base import PreparedText
from workers.models.embedding.tokenization import TextPreparer
from workers.optimize.calibration import calibration_texts, prepare_texts
from workers.runtime.template import die_with_parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="workers.autotune", description=__doc__)
    parser.add_argument("--model", required=True, help="the catalog entry as JSON")
    parser.add_argument("--folder", type=Path, required=True, help="the model's files")
    parser.add_argument(
        "--digest",
        required=True,
        help="digest of the model's files, as computed by workers.models.artifact",
    )
    parser.add_argument(
        "--settings", required=True, help="a workers.autotune.choice.TuningSettings as JSON"
    )
    arguments = parser.parse_args()
    configure_logs("WARNING")
    # Without this, the process would outlive a killed worker, and the next worker would run its
    # measurements at the same time.
    die_with_parent()
    entry = Model.model_validate_json(arguments.model)
    tuning = msgspec.json.decode(arguments.settings, type=TuningSettings)
    try:
        answer: Choice | Refusal = _choose(entry, arguments.folder, arguments.digest, tuning)
    except ConfigurationError as error:
        answer = Refusal(message=error.message)
    print(msgspec.json.encode(answer).decode(), flush=True)
    return 2 if isinstance(answer, Refusal) else 0


def _choose(entry: Model, folder: Path, digest: str, tuning: TuningSettings) -> Choice:
    artifacts_dir = Path(tuning.artifacts_dir)
    # The parent process limits the wait.
    with lock_file(artifacts_dir / "choosing.lock"):
        artifact = find_artifact(artifacts_dir, entry.name, digest)
        path = choice_path(entry, tuning, digest, artifact)
        kept_choice = read_choice(path)
        if kept_choice is not None:
            return kept_choice
        spec = SearchSpec(
            entry=entry,
            folder=folder,
            artifact=artifact,
            machine=detect_machine(),
            device=tuning.device,
            processes=tuning.processes,
            threads=tuning.threads,
            memory_fraction=tuning.memory_fraction,
            texts=_own_texts(entry, folder),
        )
        choice = choose(spec)
        # The next start may be able to measure candidates that failed this time.
        if choice.backend.call_tokens:
            write_choice(path, choice)
        return choice


def _own_texts(entry: Model, folder: Path) -> list[PreparedText]:
    """Returns a few dozen texts of varying lengths, used if there is no artifact."""
    texts = calibration_texts()
    return prepare_texts(TextPreparer(folder), texts[:: max(1, len(texts) // CALIBRATION_TEXTS)])


if __name__ == "__main__":
    sys.exit(main())
