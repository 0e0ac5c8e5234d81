"""The SchemaService on the broker's state: schemas, their revisions, and validation."""

import secrets
from collections.abc import Iterable
from functools import partial
from typing import Any

from pubsub_emulator.calls.paging import page_of
from pubsub_emulator.errors import (
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    resource_exists,
)
from pubsub_emulator.names import check_name, check_project
from pubsub_emulator.protos import Schema, SchemaRevisions, empty, message_class
from pubsub_emulator.schemas.definition import (
    check_revision,
    kind_of,
    read_definition,
)
from pubsub_emulator.state.registry import Registry
from pubsub_emulator.state.schema import (
    DELETED_SCHEMA,
    MAX_REVISIONS,
    MessageCheck,
    StoredSchema,
)
from pubsub_emulator.state.schema_settings import check_encoding

_VIEW_UNSPECIFIED, _BASIC, _FULL = 0, 1, 2
_REVISION_ID_BYTES = 4
_ListSchemasResponse = message_class("ListSchemasResponse")
_ListSchemaRevisionsResponse = message_class("ListSchemaRevisionsResponse")
_ValidateSchemaResponse = message_class("ValidateSchemaResponse")
_ValidateMessageResponse = message_class("ValidateMessageResponse")


class SchemaCalls:
    """Creates, returns, revises, deletes, and validates schemas."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def create_schema(self, request: Any) -> Any:
        """Create a schema with its first revision."""
        check_project(request.parent)
        name = f"{request.parent}/schemas/{request.schema_id}"
        check_name(name, "schemas")
        if name in self._registry.schemas:
            raise resource_exists(name)
        read_definition(request.schema)
        schema = StoredSchema(name, SchemaRevisions(), self._registry.next_sequence())
        self._registry.schemas[name] = schema
        return self._add_revision(schema, request.schema)

    def get_schema(self, request: Any) -> Any:
        """Return a schema's latest revision, or the one named as `name@revision`."""
        name, _, revision_id = request.name.partition("@")
        revision = self._registry.schema(name).revision(revision_id)
        (viewed,) = _shown((revision,), request.view or _FULL)
        return viewed

    def list_schemas(self, request: Any) -> Any:
        """List the latest revisions of a project's schemas, in pages."""
        check_project(request.parent)
        named = (
            (path, schema.latest)
            for path, schema in self._registry.schemas.items()
            if path.startswith(f"{request.parent}/")
        )
        page, token = page_of(named, request.page_size, request.page_token)
        return _ListSchemasResponse(schemas=_shown(page, request.view), next_page_token=token)

    def list_schema_revisions(self, request: Any) -> Any:
        """List a schema's revisions, oldest first, in pages."""
        schema = self._registry.schema(request.name)
        numbered = ((f"{number:04}", revision) for number, revision in enumerate(schema.revisions))
        page, token = page_of(numbered, request.page_size, request.page_token)
        return _ListSchemaRevisionsResponse(
            schemas=_shown(page, request.view), next_page_token=token
        )

    def commit_schema(self, request: Any) -> Any:
        """Add a revision of the same type."""
        schema = self._registry.schema(request.name)
        check_revision(read_definition(request.schema), read_definition(schema.latest))
        return self._add_revision(schema, request.schema)

    def rollback_schema(self, request: Any) -> Any:
        """Add a copy of an older revision as a new one."""
        schema = self._registry.schema(request.name)
        if not request.revision_id:
            raise InvalidArgument("The revision_id in the RollbackSchemaRequest must be set.")
        return self._add_revision(schema, schema.revision(request.revision_id))

    def delete_schema_revision(self, request: Any) -> Any:
        """Delete a schema revision, unless it is the only one.

        Returns the latest remaining revision.
        """
        name, _, named_id = request.name.partition("@")
        revision_id = named_id or request.revision_id
        schema = self._registry.schema(name)
        if not revision_id:
            raise InvalidArgument(
                f"A revision must be specified, as in {name}@revision (name={request.name})."
            )
        schema.revision(revision_id)
        if len(schema.revisions) == 1:
            raise FailedPrecondition(
                "The only revision of a schema can't be deleted. Delete the schema instead "
                f"(name={request.name})."
            )
        for topic in self._registry.topics.values():
            settings = topic.proto.schema_settings
            bounds = settings.first_revision_id, settings.last_revision_id
            if settings.schema == name and revision_id in bounds:
                raise FailedPrecondition(
                    f"The topic {topic.path} uses this revision as its first or last revision "
                    f"(name={request.name})."
                )
        schema.remove(revision_id)
        self._registry.journal.save(schema)
        return schema.latest

    def delete_schema(self, request: Any) -> Any:
        """Delete a schema. The schema's topics then show `_deleted-schema_` and reject messages."""
        schema = self._registry.schema(request.name)
        del self._registry.schemas[schema.path]
        self._registry.erase(schema.path)
        for topic in self._registry.topics.values():
            if topic.proto.schema_settings.schema == schema.path:
                topic.proto.schema_settings.schema = DELETED_SCHEMA
                self._registry.journal.save(topic)
        return empty()

    def validate_schema(self, request: Any) -> Any:
        """Reject an invalid definition without storing anything."""
        check_project(request.parent)
        read_definition(request.schema)
        return _ValidateSchemaResponse()

    def validate_message(self, request: Any) -> Any:
        """Reject a message that does not match a schema or the definition in the request."""
        self.validation(request).run([request.message])
        return _ValidateMessageResponse()

    def validation(self, request: Any) -> MessageCheck:
        """Return the check that a ValidateMessage request asks for."""
        check_project(request.parent)
        spec = request.WhichOneof("schema_spec")
        if spec is None:
            raise InvalidArgument("Either name or schema must be set in a ValidateMessageRequest.")
        encoding = check_encoding("encoding", request.encoding)
        if spec == "schema":
            definition = read_definition(request.schema)
            return MessageCheck("", definition.kind, encoding, [("", lambda: definition)])
        name, _, revision_id = request.name.partition("@")
        schema = self._registry.schema(name)
        revision = schema.revision(revision_id)
        definitions = [(revision.revision_id, partial(schema.definition, revision))]
        return MessageCheck(name, kind_of(revision), encoding, definitions)

    def _add_revision(self, schema: StoredSchema, source: Schema) -> Schema:
        if len(schema.revisions) >= MAX_REVISIONS:
            raise ResourceExhausted(
                f"A schema can have at most {MAX_REVISIONS} revisions. Delete some "
                f"(resource={schema.path.rpartition('/')[2]})."
            )
        revision = Schema(name=schema.path, type_=source.type_, definition=source.definition)
        revision.revision_id = secrets.token_hex(_REVISION_ID_BYTES)
        revision.revision_create_time.FromMicroseconds(int(self._registry.timers.now_s() * 1e6))
        schema.proto.schemas.append(revision)
        self._registry.journal.save(schema)
        return schema.latest


def _shown(revisions: Iterable[Schema], view: int) -> list[Schema]:
    """Return revisions, including their definitions only in the FULL view.

    Lists omit definitions by default, as documented in the API's comments.
    """
    if view not in (_VIEW_UNSPECIFIED, _BASIC, _FULL):
        raise InvalidArgument(f"Invalid view given (view={view}).")
    if view == _FULL:
        return list(revisions)
    return [_without_definition(revision) for revision in revisions]


def _without_definition(revision: Schema) -> Schema:
    bare = Schema()
    bare.CopyFrom(revision)
    bare.ClearField("definition")
    return bare
