"""A protocol buffer schema definition, compiled by Google's compiler."""

from collections.abc import Callable

from google.protobuf.descriptor_pb2 import FileDescriptorProto

from pubsub_emulator.schemas.mismatch import Budget, Malformed
from pubsub_emulator.schemas.proto_binary import check_binary
from pubsub_emulator.schemas.proto_changes import check_changes
from pubsub_emulator.schemas.proto_json import check_json
from pubsub_emulator.schemas.proto_types import MessageType, root_type
from pubsub_emulator.schemas.protoc import compile_definition

_CHECKS: dict[str, Callable[[MessageType, bytes, Budget], None]] = {
    "JSON": check_json,
    "BINARY": check_binary,
}


class ProtoDefinition:
    """A valid definition of one message. It is immutable, so threads may share it.

    Raises:
        Malformed: the definition is invalid. Contains the reason.
    """

    kind = "PROTO"

    def __init__(self, definition: str) -> None:
        file = compile_definition(definition)
        _check_file(file)
        self._root = root_type(file)

    def check(self, message: bytes, encoding: str, budget: Budget) -> None:
        """Reject a message that does not match, by raising `Mismatch`."""
        _CHECKS[encoding](self._root, message, budget)

    def check_revises(self, latest: "ProtoDefinition") -> None:
        """Reject changes that a revision of `latest` may not make, by raising `Malformed`."""
        check_changes(latest._root, self._root)


def _check_file(file: FileDescriptorProto) -> None:
    """Reject files that are valid but are not schemas.

    Source: https://cloud.google.com/pubsub/docs/schemas.
    """
    if file.dependency:
        raise Malformed("a definition can't import other files")
    if file.syntax == "editions":
        raise Malformed("it uses an edition, but its syntax must be proto2 or proto3")
    names = [message.name for message in file.message_type]
    names += [enum.name for enum in file.enum_type]
    if len(names) != 1 or not file.message_type:
        raise Malformed(
            "it must define one message and no other type at its top level, but defines "
            f"{', '.join(names) or 'none'}"
        )
