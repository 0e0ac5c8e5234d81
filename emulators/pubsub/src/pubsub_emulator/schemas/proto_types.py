"""The types in a protocol buffer definition, for validating messages.

The library's message classes are not used, because they construct every value: for a type with
5,000 fields, an empty value takes two bytes in a message but 40 KB of memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

VARINT, I64, LEN, START_GROUP, END_GROUP, I32 = range(6)
"""Wire types. Source: https://protobuf.dev/programming-guides/encoding/#structure"""
_WIRE_TYPES = {
    "DOUBLE": I64,
    "FLOAT": I32,
    "FIXED64": I64,
    "FIXED32": I32,
    "SFIXED64": I64,
    "SFIXED32": I32,
    "STRING": LEN,
    "BYTES": LEN,
    "MESSAGE": LEN,
    "GROUP": START_GROUP,
}


@dataclass(frozen=True)
class EnumType:
    """An enum. A closed enum, as in proto2, allows only the values it defines."""

    name: str
    names: frozenset[str]
    numbers: frozenset[int]
    is_closed: bool


@dataclass(eq=False, repr=False, slots=True)
class Field:
    """A field of a message, or an extension of the message.

    `type` is, for example, `INT32`; `wire_type` is the field's encoding when not packed; `oneof` is
    its oneof's number or None.
    """

    name: str
    number: int
    type: str
    is_repeated: bool
    is_required: bool
    is_utf8: bool
    oneof: int | None
    message: "MessageType | None" = None
    enum: EnumType | None = None
    wire_type: int = field(init=False)
    may_be_packed: bool = field(init=False)

    def __post_init__(self) -> None:
        self.wire_type = _WIRE_TYPES.get(self.type, VARINT)
        self.may_be_packed = self.is_repeated and self.wire_type in (VARINT, I64, I32)


@dataclass(eq=False, repr=False)
class MessageType:
    """A message type.

    `may_lack` means that the message, or a message inside it, may lack a required field.
    """

    name: str
    is_map_entry: bool
    by_number: dict[int, Field] = field(default_factory=dict)
    by_json_name: dict[str, Field] = field(default_factory=dict)
    required: dict[int, str] = field(default_factory=dict)
    may_lack: bool = False

    def add(self, added: Field, json_names: Iterable[str]) -> None:
        """Add a field under these JSON names."""
        self.by_number[added.number] = added
        for json_name in json_names:
            self.by_json_name[json_name] = added
        if added.is_required:
            self.required[added.number] = added.name


def root_type(file: FileDescriptorProto) -> MessageType:
    """Return a file's only top-level message, with everything it refers to."""
    return _Types(file).messages[_joined(f".{file.package}", file.message_type[0].name)]


class _Types:
    """All of a file's types by full name, which starts with a dot."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self.messages: dict[str, MessageType] = {}
        self._enums: dict[str, EnumType] = {}
        self._is_proto3 = file.syntax == "proto3"
        self._fields: list[tuple[str, FieldDescriptorProto]] = []
        self._extensions: list[tuple[str, FieldDescriptorProto]] = []
        scope = f".{file.package}".rstrip(".")
        self._extensions += [(scope, definition) for definition in file.extension]
        for message in file.message_type:
            self._declare(scope, message)
        for name, definition in self._fields:
            self.messages[name].add(
                self._field(definition, definition.name), (definition.name, definition.json_name)
            )
        for scope, definition in self._extensions:
            name = _joined(scope, definition.name)[1:]
            self.messages[definition.extendee].add(self._field(definition, name), (f"[{name}]",))
        self._find_lacking()

    def _declare(self, scope: str, message: DescriptorProto) -> None:
        name = _joined(scope, message.name)
        self.messages[name] = MessageType(name[1:], message.options.map_entry)
        self._fields += [(name, definition) for definition in message.field]
        self._extensions += [(name, definition) for definition in message.extension]
        for enum in message.enum_type:
            self._declare_enum(name, enum)
        for nested in message.nested_type:
            self._declare(name, nested)

    def _declare_enum(self, scope: str, enum: EnumDescriptorProto) -> None:
        name = _joined(scope, enum.name)
        self._enums[name] = EnumType(
            name[1:],
            frozenset(value.name for value in enum.value),
            frozenset(value.number for value in enum.value),
            is_closed=not self._is_proto3,
        )

    def _field(self, proto: FieldDescriptorProto, name: str) -> Field:
        kind = FieldDescriptorProto.Type.Name(proto.type).removeprefix("TYPE_")
        return Field(
            name,
            proto.number,
            kind,
            is_repeated=proto.label == FieldDescriptorProto.LABEL_REPEATED,
            is_required=proto.label == FieldDescriptorProto.LABEL_REQUIRED,
            is_utf8=self._is_proto3 and kind == "STRING",
            oneof=proto.oneof_index if proto.HasField("oneof_index") else None,
            message=self.messages.get(proto.type_name),
            enum=self._enums.get(proto.type_name),
        )

    def _find_lacking(self) -> None:
        users: dict[MessageType, list[MessageType]] = {}
        for user in self.messages.values():
            for used in user.by_number.values():
                if used.message is not None:
                    users.setdefault(used.message, []).append(user)
        waiting = [message for message in self.messages.values() if message.required]
        while waiting:
            message = waiting.pop()
            if not message.may_lack:
                message.may_lack = True
                waiting += users.get(message, [])


def _joined(scope: str, name: str) -> str:
    return f"{scope.rstrip('.')}.{name}"
