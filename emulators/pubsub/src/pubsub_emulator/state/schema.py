"""A schema with its revisions, and checks of messages against a range of revisions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pubsub_emulator.errors import MessageRefused, ResourceNotFound
from pubsub_emulator.protos import PubsubMessage, Schema, SchemaRevisions
from pubsub_emulator.schemas.definition import Definition, read_definition
from pubsub_emulator.schemas.mismatch import Budget, Mismatch

DELETED_SCHEMA = "_deleted-schema_"
MAX_REVISIONS = 20
"""Source: https://cloud.google.com/pubsub/quotas#resource_limits"""


class StoredSchema:
    """A schema's revisions in stored form, oldest first.

    `holder` is the schema's number in the journal.
    """

    moment_s = 0.0

    def __init__(self, path: str, proto: SchemaRevisions, holder: int) -> None:
        self.path = path
        self.holder = holder
        self.proto = proto
        self._definitions: dict[str, Definition] = {}

    @property
    def revisions(self) -> Sequence[Schema]:
        revisions: Sequence[Schema] = self.proto.schemas
        return revisions

    @property
    def latest(self) -> Schema:
        return self.revisions[-1]

    def revision(self, revision_id: str) -> Schema:
        """Return a revision. Without an id, return the latest revision.

        Raises:
            ResourceNotFound: the revision does not exist.
        """
        return self.revisions[self._index(revision_id)] if revision_id else self.latest

    def range(self, first_id: str, last_id: str) -> list[Schema]:
        """Return the revisions in a range, newest first. An empty id sets no limit.

        Raises:
            ResourceNotFound: a revision does not exist.
        """
        first = self._index(first_id) if first_id else 0
        last = self._index(last_id) if last_id else len(self.revisions) - 1
        return list(reversed(self.revisions[first : last + 1]))

    def definition(self, revision: Schema) -> Definition:
        """Return a revision's parsed definition. It is parsed only once."""
        definition = self._definitions.get(revision.revision_id)
        if definition is None:
            definition = self._definitions[revision.revision_id] = read_definition(revision)
        # Not looked up again, because another thread may have removed the revision.
        return definition

    def remove(self, revision_id: str) -> None:
        """Remove a revision.

        Raises:
            ResourceNotFound: the revision does not exist.
        """
        del self.proto.schemas[self._index(revision_id)]
        self._definitions.pop(revision_id, None)

    def _index(self, revision_id: str) -> int:
        for index, revision in enumerate(self.revisions):
            if revision.revision_id == revision_id:
                return index
        raise ResourceNotFound(
            f"Schema revision not found (resource={self.path.rpartition('/')[2]}@{revision_id})."
        )


@dataclass(frozen=True)
class MessageCheck:
    """Checks messages against a schema's revisions, newest first.

    It may run in a thread. Each definition is parsed when a message is first checked against it.
    `kind` is AVRO or PROTO for all of them.
    """

    schema_name: str
    kind: str
    encoding: str
    definitions: Sequence[tuple[str, Callable[[], Definition]]]

    def run(self, messages: Iterable[bytes]) -> list[str]:
        """Return, for each message, the id of the newest revision that it matches.

        Raises:
            MessageRefused: a message matches no revision.
        """
        budget = Budget()
        return [self._fitting(message, budget) for message in messages]

    def stamp(self, message: PubsubMessage, revision_id: str) -> None:
        """Add the attributes that identify the message's schema to subscribers.

        Source: https://cloud.google.com/pubsub/docs/schemas
        """
        message.attributes["googclient_schemaencoding"] = self.encoding
        message.attributes["googclient_schemaname"] = self.schema_name
        message.attributes["googclient_schemarevisionid"] = revision_id

    def _fitting(self, message: bytes, budget: Budget) -> str:
        why = "there are no revisions between the topic's first and last revision"
        for revision_id, definition in self.definitions:
            try:
                definition().check(message, self.encoding, budget)
            except Mismatch as mismatch:
                why = f"last checked revision: revision_id={revision_id} failed with status: "
                why += str(mismatch)
            else:
                return revision_id
        raise MessageRefused(
            self.encoding,
            self.kind,
            "Could not validate message with any schema revision for schema: "
            f"{self.schema_name}, {why}",
        )
