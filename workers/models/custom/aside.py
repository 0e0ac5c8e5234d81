"""Asks a class questions outside of predictions: an input's work, and whether outputs are close.

`work(self, input) -> int` is called before an item is queued, and `is_close(self, a, b) -> bool`
after the item is computed. Both are called in a separate runner, because the other runners are busy
computing. This runner has imported the class but not set it up. It handles one question at a time
and is killed if it doesn't respond in time, so no input delays the others for long.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.errors import BadInput, InputTooLarge, ModelFailed
from shared.models.catalog import Model
from shared.models.tasks.custom import CustomResult, interface_of
from shared.settings import Settings, read_settings
from workers.models.base import PreparedCustom
from workers.models.custom.checking import INSPECTION_LIMIT_S
from workers.models.custom.class_process import paths_of
from workers.models.custom.environments import python_for
from workers.models.custom.predictions import message_of, outcome_of
from workers.models.custom.process import RunnerProcess, end_of
from workers.models.custom.public_text import PathRemover
from workers.models.custom.runner.frames import Frame
from workers.models.custom.services import service_ports
from workers.models.custom.sources import read_sources
from workers.models.custom.variables import EntryVariables, variables_of

ANSWER_LIMIT_S = 5.0
"""Time limit per question. Weighing an input only reads sizes, and comparing two outputs takes
little work.
"""


class AsideClass:
    """A class in a separate runner, which starts when the first question is asked.

    Threads may share it.
    """

    def __init__(self, entry: Model, folder: Path) -> None:
        self._interface = interface_of(entry)
        self._max_work = entry.work.max or 1
        self._resources = entry.resources
        self._variables = EntryVariables(entry.environment, entry.secrets)
        self._folder = folder
        self._runner: RunnerProcess | None = None
        self._paths = PathRemover(None, ())
        self._turn = threading.Lock()

    def weigh(self, item: PreparedCustom) -> int:
        """Returns an input's work, from 1 to the entry's maximum. Waits for the runner.

        Raises:
            BadInput: the class rejects the input, or its work exceeds the maximum.
            ModelFailed: the class can't determine the item's work.
        """
        work = int(self._ask("work", *message_of(0, item)))
        if work < 1:
            raise ModelFailed(f"work: must return a whole number of at least 1, got {work}")
        if work > self._max_work:
            raise InputTooLarge(
                f"the work of this input is {work}, which exceeds the maximum of {self._max_work}",
                field="input",
            )
        return work

    def is_close(self, ours: CustomResult, theirs: CustomResult) -> bool:
        """Returns whether the class considers two outputs for one input to be close.

        Waits for the runner.
        """
        both = (ours.unpack(), theirs.unpack())
        files = [
            {"at": [number, *place.at], "name": place.name}
            for number, result in enumerate(both)
            for place in result.places
        ]
        message = {"id": 0, "outputs": [result.output for result in both], "files": files}
        return bool(
            self._ask(
                "close", message, [file.data or b"" for result in both for file in result.files]
            )
        )

    def _ask(self, name: str, message: dict[str, Any], blobs: Sequence[bytes]) -> Any:
        """Returns the field `name` from the response to a message."""
        function = "is_close" if name == "close" else name
        with self._turn:
            runner = self._runner or self._start_runner(function)
            runner.send(message, blobs)
            frames = self._receive(runner, ANSWER_LIMIT_S)
            if not frames:
                raise self._end(runner, function, frames, ANSWER_LIMIT_S)
        if "error" in frames[0].message:
            error = outcome_of(frames[0], self._interface, work=0, paths=self._paths)
            reason = self._paths.remove(str(frames[0].message["error"]))
            raise error if isinstance(error, BadInput) else ModelFailed(f"{function}: {reason}")
        return frames[0].message[name]

    def _start_runner(self, function: str) -> RunnerProcess:
        """Returns the runner, with the class imported.

        Raises:
            ModelFailed: the class can't be imported, or Secret Manager is unreachable.
            ConfigurationError: one of its secrets is missing, or its packages can't be installed.
        """
        sources = read_sources(self._folder)
        variables = variables_of(self._folder, self._variables)
        runner = RunnerProcess(
            self._folder,
            python=python_for(self._folder),
            environment=variables.environment,
            hidden=variables.hidden,
            resources=self._resources,
            denied_ports=service_ports(read_settings(Settings)),
            is_aside=True,
        )
        self._paths = paths_of(self._folder, sources, runner)
        frames = self._receive(runner, INSPECTION_LIMIT_S)
        if not frames:
            raise self._end(runner, function, frames, INSPECTION_LIMIT_S)
        if "ready" not in frames[0].message:
            runner.close()
            reason = str(frames[0].message.get("failed", "it did not start"))
            raise ModelFailed(f"{function}: {self._paths.remove(reason)}")
        self._runner = runner
        return runner

    def _receive(self, runner: RunnerProcess, limit_s: float) -> list[Frame] | None:
        try:
            return runner.receive(limit_s)
        except ValueError as error:
            runner.kill(f"it sent an invalid response: {error}")
            return None

    def _end(
        self, runner: RunnerProcess, function: str, frames: list[Frame] | None, limit_s: float
    ) -> ModelFailed:
        """Ends a runner that did not respond. The next question gets a new one.

        Args:
            frames: what `_receive` returned: None if the process has exited.

        Returns:
            The error to raise, with the reason.
        """
        self._runner = None
        if frames is not None:
            runner.kill("it took too long")
            runner.close()
            return ModelFailed(f"{function}: no response within {limit_s:g} s")
        status = runner.close()
        reason = f"was killed: {runner.killed_for}" if runner.killed_for else end_of(status)
        return ModelFailed(f"{function}: the class's process {reason}")

    def close(self) -> None:
        with self._turn:
            runner, self._runner = self._runner, None
        if runner is not None:
            runner.kill("it is no longer needed")
            runner.close()
