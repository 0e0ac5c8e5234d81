"""Penstock: a class run through the client that a worker's pool uses."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import BadInput, Canceled, PenstockError
from shared.messages import PrintedLogs
from shared.models.blob import Blob
from shared.models.catalog import Model
from shared.models.interface import ModelInterface
from shared.models.tasks import Result
from shared.models.tasks.custom import CustomResult, FilePlace, StreamedElement, read_elements
from tests.cog_comparison.outcome import Outcome, Request, data_of, describe_file, put
from workers.models.base import PreparedCustom, PreparedFile
from workers.models.custom.client import ClassClient
from workers.models.reports import ItemEnded, Pieces, StepMessage

START_LIMIT_S = 60.0
PREDICT_LIMIT_S = 30.0
DIED = ("the model process ", "the class's process ")
"""Prefixes of the error message for a prediction whose process died."""


class _Running:
    """A prediction that was sent, and its results so far."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.text = ""
        """The prediction's pieces, as in its stream."""
        self.texts: list[str] = []
        self.files: dict[str, bytes] = {}
        """Files from pieces that are too large for the stream, by digest."""
        self.ended: asyncio.Future[Outcome] = loop.create_future()

    def resolve(self, outcome: Outcome) -> None:
        """Finishes the prediction, unless it has already finished."""
        if not self.ended.done():
            self.ended.set_result(outcome)


class PenstockRunner:
    """A class in its process, as a worker runs it."""

    def __init__(self, folder: Path, interface: ModelInterface) -> None:
        self._folder = folder
        self._interface = interface
        self._client: ClassClient | None = None
        self._run: asyncio.Task[None] | None = None
        self._running: dict[int, _Running] = {}
        """Predictions in the current run, keyed by slot."""

    async def start(self) -> str:
        """Loads and sets up the class."""
        entry = Model.model_validate(
            {
                "name": "compared",
                "task": "custom",
                "source": f"local:{self._folder}",
                "interface": self._interface,
            }
        )
        try:
            self._client = await ClassClient.start(
                entry, self._folder, "cpu", 1, START_LIMIT_S, _keep_all
            )
        except PenstockError as error:
            return error.message.removeprefix(f"{self._folder}: ")
        return ""

    async def predict(self, request: Request) -> Outcome:
        """Sends one prediction, and waits for it to finish."""
        assert self._client is not None, "it is started before"
        running = _Running(asyncio.get_running_loop())
        item = PreparedCustom(
            key="",
            length=1,
            values=_without_nulls(request),
            files=[
                PreparedFile(at=file.at, name=file.name, data=file.data) for file in request.files
            ],
            is_streamed=True,
            context=dict(request.context),
        )
        if self._interface.batches:
            return await self._predict_batch(item, running)
        slot = await self._admit(self._client, item, running)
        if request.cancel_after_s is not None:
            asyncio.get_running_loop().call_later(request.cancel_after_s, self._client.drop, [slot])
        try:
            return await asyncio.wait_for(running.ended, PREDICT_LIMIT_S)
        except TimeoutError:
            return Outcome("too late")

    async def stop(self) -> None:
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    async def _predict_batch(self, item: PreparedCustom, running: _Running) -> Outcome:
        assert self._client is not None, "it is started before"
        try:
            done = await self._client.run([item], PREDICT_LIMIT_S)
        except PenstockError as error:
            return Outcome("died", error=error.message)
        logs = done.logs.get(0, PrintedLogs())
        return self._outcome_of(running, done.outcomes[0], logs)

    async def _admit(self, client: ClassClient, item: PreparedCustom, running: _Running) -> int:
        """Adds an item to the run, or begins a new run with it. Returns its slot."""
        while self._run is not None and not self._run.done():
            if (slot := client.admit([item])) is not None:
                self._running[slot] = running
                return slot
            await asyncio.sleep(0)
        self._running = {0: running}
        self._run = asyncio.create_task(self._run_steps(client, item))
        return 0

    async def _run_steps(self, client: ClassClient, item: PreparedCustom) -> None:
        try:
            await client.run_steps([item], PREDICT_LIMIT_S, self._on_message)
        except PenstockError as error:
            for running in self._running.values():
                running.resolve(Outcome("died", error=error.message))

    def _on_message(self, message: StepMessage) -> None:
        if isinstance(message, Pieces):
            for slot, chunk in message.chunks.items():
                running = self._running[slot]
                running.texts += chunk.pieces
                running.text += chunk.text
            for slot, files in message.files.items():
                self._running[slot].files |= {one.file.digest: one.data for one in files}
        elif isinstance(message, ItemEnded):
            running = self._running[message.slot]
            logs = message.done.logs.get(0, PrintedLogs())
            running.resolve(self._outcome_of(running, message.done.outcomes[0], logs))

    def _outcome_of(
        self, running: _Running, result: Result | PenstockError, logs: PrintedLogs
    ) -> Outcome:
        shown = Outcome("", logs=logs.text)
        if isinstance(result, CustomResult):
            result = result.unpack()
            output = _with_files(result.output, result.places, result.files)
            pieces = output if self._interface.streams else []
            return shown._replace(
                status="succeeded", output=output, pieces=pieces, metrics=result.metrics
            )
        assert isinstance(result, PenstockError), f"a class has no {type(result).__name__}"
        if isinstance(result, Canceled):  # only a worker knows what its caller has read
            return shown._replace(status="canceled")
        status = "died" if result.message.startswith(DIED) else "failed"
        status = "refused" if isinstance(result, BadInput) else status
        pieces = self._pieces_of(running)
        return shown._replace(
            status=status, output=pieces or None, pieces=pieces, error=result.message
        )

    def _pieces_of(self, running: _Running) -> Sequence[Any]:
        """The pieces of a failed prediction."""
        if self._interface.streams == "text":
            return running.texts
        return [_described(one, running.files) for one in read_elements(running.text)]


async def _keep_all() -> bool:
    """Evicts nothing, because no other model runs."""
    return False


def _without_nulls(request: Request) -> dict[str, Any]:
    """The input as the API sends it: null is the same as leaving an input out."""
    with_files = {file.at[0] for file in request.files}
    values = copy.deepcopy(dict(request.values))
    return {name: one for name, one in values.items() if one is not None or name in with_files}


def _with_files(output: Any, places: Sequence[FilePlace], files: Sequence[Blob]) -> Any:
    whole = {"value": msgspec.json.decode(msgspec.json.encode(output))}
    for place, file in zip(places, files, strict=True):
        put(whole, ["value", *place.at], describe_file(file.data or b"", place.name))
    return whole["value"]


def _described(element: StreamedElement, files: dict[str, bytes]) -> Any:
    whole = {"value": element.value}
    for file in element.files:
        data = data_of(file.uri) if file.uri else files[file.digest]
        put(whole, ["value", *file.at], describe_file(data))
    return whole["value"]
