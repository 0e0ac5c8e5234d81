"""The changes that a revision of a protocol buffer definition may make."""

from pubsub_emulator.schemas.mismatch import Malformed
from pubsub_emulator.schemas.proto_types import Field, MessageType


def check_changes(latest: MessageType, revised: MessageType) -> None:
    """Reject all changes except adding and removing optional fields.

    Source: https://cloud.google.com/pubsub/docs/commit-schema-revision

    Raises:
        Malformed: anything else changed; the message names a field that differs.
    """
    compared = set()
    pairs = [(latest, revised)]
    while pairs:
        old, new = pair = pairs.pop()
        if pair in compared:
            continue
        compared.add(pair)
        for number in old.by_number.keys() ^ new.by_number.keys():
            _check_optional(old.by_number.get(number) or new.by_number[number], new)
        for number in old.by_number.keys() & new.by_number.keys():
            before, after = old.by_number[number], new.by_number[number]
            if _signature(before, latest) != _signature(after, revised):
                raise Malformed(
                    f"a revision can't change a field, but {before.name} of {new.name} differs"
                )
            if before.message is not None and after.message is not None:
                pairs.append((before.message, after.message))


def _check_optional(field: Field, message: MessageType) -> None:
    if field.is_required or field.is_repeated:
        label = "required" if field.is_required else "repeated"
        raise Malformed(
            f"a revision can only add and remove optional fields, but {field.name} of "
            f"{message.name} is {label}"
        )


def _signature(field: Field, root: MessageType) -> tuple[object, ...]:
    kind = field.message or field.enum
    # Types are named relative to the message, whose own name may have changed.
    type_name = kind.name.removeprefix(root.name) if kind else ""
    return (field.name, field.type, field.is_repeated, field.is_required, type_name)
