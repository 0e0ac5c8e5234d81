"""A topic's schema settings: validating them, and creating the message check that they require."""

from collections.abc import Callable
from functools import partial

from pubsub_emulator.errors import InvalidArgument, ResourceNotFound
from pubsub_emulator.names import check_name
from pubsub_emulator.protos import Topic
from pubsub_emulator.schemas.definition import kind_of
from pubsub_emulator.state.schema import DELETED_SCHEMA, MessageCheck, StoredSchema

_ENCODINGS = {1: "JSON", 2: "BINARY"}

FindSchema = Callable[[str], StoredSchema]


def check_encoding(field: str, encoding: int) -> str:
    """Return an encoding's name.

    Raises:
        InvalidArgument: the encoding does not exist or is missing.
    """
    if encoding not in _ENCODINGS:
        raise InvalidArgument(f"Invalid {field} given. It must be JSON or BINARY.")
    return _ENCODINGS[encoding]


def check_schema_settings(topic: Topic, current: Topic | None, find_schema: FindSchema) -> None:
    """Reject a topic with invalid schema settings.

    Args:
        topic: the topic after the change.
        current: the topic before the change; None for a new one. If its schema was deleted, the
            topic may keep that setting.
        find_schema: returns a schema by name, or raises an error.

    Raises:
        InvalidArgument: the name or encoding is missing, or the first revision is later than the
            last.
        ResourceNotFound: the schema or a revision does not exist.
    """
    if not topic.HasField("schema_settings"):
        return
    settings = topic.schema_settings
    check_encoding("schema_settings.encoding", settings.encoding)
    was = current.schema_settings.schema if current is not None else ""
    if settings.schema == was == DELETED_SCHEMA:
        return
    check_name(settings.schema, "schemas")
    revisions = find_schema(settings.schema).range(
        settings.first_revision_id, settings.last_revision_id
    )
    if not revisions:
        raise InvalidArgument(
            "Invalid schema_settings given. The first_revision_id must not be later than the "
            "last_revision_id."
        )


def message_check(topic: Topic, find_schema: FindSchema) -> MessageCheck:
    """Return the check for messages published to a topic with a schema.

    Raises:
        ResourceNotFound: the schema was deleted.
    """
    settings = topic.schema_settings
    if settings.schema == DELETED_SCHEMA:
        raise ResourceNotFound(
            f"The topic's schema was deleted (resource={topic.name.rpartition('/')[2]})."
        )
    schema = find_schema(settings.schema)
    revisions = schema.range(settings.first_revision_id, settings.last_revision_id)
    definitions = [
        (revision.revision_id, partial(schema.definition, revision)) for revision in revisions
    ]
    return MessageCheck(
        schema.path, kind_of(schema.latest), _ENCODINGS[settings.encoding], definitions
    )
