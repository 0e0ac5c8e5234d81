"""Functions for STRING and BYTES."""

from __future__ import annotations

import re

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types
from zetasql.wasi._pb2.zetasql.public.type_pb2 import TypeProto

from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.translation.casts import cast
from bigquery_emulator.googlesql.translation.functions.registry import (
    Call,
    Functions,
    Translate,
)
from bigquery_emulator.googlesql.translation.literals import text
from bigquery_emulator.udf.texts import folded

_STRING, _BYTES = types.TYPE_STRING, types.TYPE_BYTES
_WORD_BREAKS = r"""\s\x0b\[\](){}/|\\<>!?@"^#$&~_,.:;*%+\-"""
"""INITCAP's default delimiters, as characters in an RE2 character class."""
_FORMAT_PART = re.compile(r"%([-+ 0#']*)(\d*)(?:\.(\d+))?(.)")


def _of_text(form: str) -> Translate:
    """Returns a form that accepts only STRING."""

    def write(call: Call) -> str:
        if call.kind() != _STRING or (form.count("{") and f"{{{len(call.sql) - 1}}}" not in form):
            raise call.refused()
        return form.format(*call.sql)

    return write


def _length(call: Call) -> str:
    return f"CAST({'octet_length' if call.kind() == _BYTES else 'length'}({call.sql[0]}) AS BIGINT)"


def _byte_length(call: Call) -> str:
    value = call.sql[0] if call.kind() == _BYTES else f"encode({call.sql[0]})"
    return f"CAST(octet_length({value}) AS BIGINT)"


def _concat(call: Call) -> str:
    # DuckDB's concat skips NULL.
    return f"({' || '.join(call.sql)})"


def _substr(call: Call) -> str:
    macro = "substr_bytes" if call.kind() == _BYTES else "substr"
    return f"bq.{macro}({', '.join(call.sql)})"


def _trim(name: str) -> Translate:
    def write(call: Call) -> str:
        if call.kind() != _STRING:
            raise call.refused()
        if len(call.sql) == 1:
            return f"bq.{name}_spaces({call.sql[0]})"
        return f"{name}({call.sql[0]}, {call.sql[1]})"

    return write


def _padded(name: str) -> Translate:
    def write(call: Call) -> str:
        if call.kind() != _STRING:
            raise call.refused()
        pad = call.sql[2] if len(call.sql) > 2 else "' '"
        return f"bq.{name}({call.sql[0]}, {call.sql[1]}, {pad})"

    return write


def _split(call: Call) -> str:
    if call.kind() != _STRING:
        raise call.refused()
    separator = call.sql[1] if len(call.sql) > 1 else "','"
    return f"bq.split({call.sql[0]}, {separator})"


def _regexp(form: str, group_form: str | None = None) -> Translate:
    """Returns a function whose RE2 pattern must be a literal that means the same in DuckDB."""

    def write(call: Call) -> str:
        pattern = call.text(1)
        if call.kind() != _STRING or len(call.sql) > 3 or pattern is None:
            raise call.refused()
        groups = _groups(pattern)
        if groups > 1 and group_form is not None:
            raise unsupported("A pattern with several groups")
        chosen = group_form if groups and group_form is not None else form
        if f"{{{len(call.sql) - 1}}}" not in chosen:
            raise call.refused()
        return chosen.format(*call.sql)

    return write


def _groups(pattern: str) -> int:
    try:
        return re.compile(pattern).groups
    except re.error as error:
        raise unsupported(f"The pattern {pattern!r}") from error


def _regexp_extract_all(call: Call) -> str:
    pattern = call.text(1)
    if pattern is not None and _groups(pattern) <= 1 and _can_be_empty(pattern):
        # DuckDB finds an additional empty match at the end.
        raise unsupported("REGEXP_EXTRACT_ALL with a pattern that matches an empty text")
    return _regexp("regexp_extract_all({0}, {1}, 0)", "bq.regexp_extract_groups({0}, {1})")(call)


def _can_be_empty(pattern: str) -> bool:
    try:
        return re.search(re.sub(r"\\[bB]", "", pattern), "") is not None
    except re.error:
        return True


def _regexp_instr(call: Call) -> str:
    pattern = call.text(1)
    if call.kind() != _STRING or len(call.sql) > 2 or pattern is None:
        raise call.refused()
    if _groups(pattern) or _can_be_empty(pattern):
        raise unsupported("REGEXP_INSTR with a group or an empty match")
    # The text before the first match.
    return f"bq.regexp_instr({call.sql[0]}, {call.sql[1]}, {text(f'(?s)^(.*?)(?:{pattern})')})"


def _regexp_replace(call: Call) -> str:
    replacement = call.text(2)
    if call.kind() != _STRING or call.text(1) is None or replacement is None:
        raise call.refused()
    return call.put("regexp_replace({0}, {1}, {2}, 'g')")


def _string(call: Call) -> str:
    if call.kind() in (types.TYPE_TIMESTAMP, types.TYPE_DATE, types.TYPE_DATETIME, types.TYPE_TIME):
        if len(call.sql) == 1:
            return cast(call.sql[0], call.nodes[0].type, call.type)
        return f"bq.timestamp_text_at({call.sql[0]}, {call.zone(1)})"
    if call.kind() == types.TYPE_JSON:
        return f"bq.json_string({call.sql[0]})"
    raise call.refused()


def _format(call: Call) -> str:
    pattern = call.text(0)
    if pattern is None:
        raise unsupported("FORMAT with a pattern that is not a literal")
    parts, place, at = [], 1, 0
    for match in _FORMAT_PART.finditer(pattern):
        if match.start() > at:
            parts.append(text(pattern[at : match.start()]))
        at = match.end()
        if match.group() == "%%":
            parts.append("'%'")
            continue
        parts.append(_format_element(call, place, match))
        place += 1
    if at < len(pattern):
        parts.append(text(pattern[at:]))
    return f"({' || '.join(parts)})" if parts else "''"


def _format_element(call: Call, place: int, found: re.Match[str]) -> str:
    flags, width, digits, letter = found.groups()
    value, kind = call.sql[place], call.kind(place)
    spec = f"%{flags}{width}{'' if digits is None else '.' + digits}"
    if letter in "fF" and kind == types.TYPE_NUMERIC:
        return f"bq_format_numeric({text(spec + 'f')}, {value})"
    if "'" in flags:
        if letter not in "di" or kind != types.TYPE_INT64 or digits is not None:
            raise unsupported("FORMAT with grouping of digits of this type")
        return f"bq_format_numeric({text(spec + '.0f')}, CAST({value} AS DECIMAL(38,9)))"
    if letter in "di" and kind == types.TYPE_INT64 and digits is None:
        return f"printf({text(spec + 'd')}, {value})"
    if found.group() in ("%x", "%X", "%o") and kind == types.TYPE_INT64:
        return f"bq.format_digits({text(spec + letter)}, {value})"
    if letter in "fF" and kind == types.TYPE_DOUBLE:
        return f"bq.format_float({text(spec + 'f')}, {value})"
    if letter in "eEgG" and kind == types.TYPE_DOUBLE:
        return f"bq.format_float({text(spec + letter)}, {value})"
    if letter == "s" and kind == _STRING and digits is None and not flags.strip("-"):
        return f"printf({text(spec + 's')}, {value})"
    if letter == "t" and not flags and not width and digits is None:
        return _shown(call, place)
    raise unsupported(f"FORMAT element {spec}{letter} of this type")


def _shown(call: Call, place: int) -> str:
    kind = call.nodes[place].type
    if kind.type_kind == _STRING:
        as_string = call.sql[place]
    else:
        wanted = type(kind)(type_kind=_STRING)
        as_string = cast(call.sql[place], kind, wanted)
    if kind.type_kind == types.TYPE_DOUBLE:
        # A whole FLOAT64 is formatted as 1.0 here, but as 1 when cast to STRING.
        as_string = f"bq.float_shown({call.sql[place]})"
    return f"coalesce({as_string}, 'NULL')"


def _edge(name: str) -> Translate:
    def write(call: Call) -> str:
        macro = f"{name}_bytes" if call.kind() == _BYTES else name
        return f"bq.{macro}({call.sql[0]}, {call.sql[1]})"

    return write


def _with_edge(name: str) -> Translate:
    """Tests whether a value starts or ends with another. Also works on the hex digits of BYTES."""

    def write(call: Call) -> str:
        if call.kind() == _BYTES:
            return call.put(f"{name}(to_hex({{0}}), to_hex({{1}}))")
        return call.put(f"{name}({{0}}, {{1}})")

    return write


def _by_kind(of_text: str, of_bytes: str) -> Translate:
    """Returns one form for STRING and one for BYTES."""

    def write(call: Call) -> str:
        return call.put(of_bytes if call.kind() == _BYTES else of_text)

    return write


def _initcap(call: Call) -> str:
    if len(call.sql) == 1:
        breaks = _WORD_BREAKS
    else:
        delimiters = call.text(1)
        if delimiters is None or any(letter.isalpha() for letter in delimiters):
            raise unsupported("INITCAP with delimiters that are letters or not a literal")
        breaks = "".join(f"\\x{{{ord(letter):x}}}" for letter in delimiters)
    words = f"[{breaks}]|[^{breaks}]+" if breaks else "(?s).+"
    return f"bq.initcap({call.sql[0]}, {text(words)})"


def _instr(call: Call) -> str:
    if call.kind() != _STRING:
        raise call.refused()
    if len(call.sql) == 2:
        return call.put("CAST(strpos({0}, {1}) AS BIGINT)")
    value, wanted, position, *occurrence = call.sql
    return f"bq.instr({value}, {wanted}, {position}, {(occurrence or ['1'])[0]})"


def _strpos(call: Call) -> str:
    if call.kind() != _STRING:
        raise call.refused()
    return f"CAST(strpos({call.sql[0]}, {call.sql[1]}) AS BIGINT)"


def _contains_substr(call: Call) -> str:
    wanted = call.text(1)
    if wanted is None:
        raise unsupported("CONTAINS_SUBSTR of a text that is not a literal")
    return _find_text(call.sql[0], call.nodes[0].type, text(folded(wanted)))


def _find_text(value: str, kind: TypeProto, wanted: str, depth: int = 0) -> str:
    """Tests whether a value, or a value nested in it, contains a string. NULL if unknown."""
    if kind.type_kind == types.TYPE_STRUCT:
        parts = [
            _find_text(f"struct_extract_at({value}, {place})", field.field_type, wanted, depth)
            for place, field in enumerate(kind.struct_type.field, 1)
        ]
        condition = " OR ".join(parts) or "false"
        return f"(CASE WHEN {value} IS NOT NULL THEN {condition} END)"
    if kind.type_kind == types.TYPE_ARRAY:
        element = f"s{depth}"
        inner = _find_text(element, kind.array_type.element_type, wanted, depth + 1)
        condition = f"list_transform({value}, lambda {element}: {inner})"
        return f"(CASE WHEN len({value}) = 0 THEN false ELSE bq.any_true({condition}) END)"
    if kind.type_kind in (types.TYPE_JSON, _BYTES, types.TYPE_DOUBLE):
        raise unsupported("CONTAINS_SUBSTR of this type")
    as_string = cast(value, kind, TypeProto(type_kind=_STRING))
    return f"contains(bq_folded({as_string}), {wanted})"


STRINGS: Functions = {
    "upper": _of_text("bq.upper({0})"),
    "lower": _of_text("bq.lower({0})"),
    "length": _length,
    "char_length": _of_text("CAST(length({0}) AS BIGINT)"),
    "byte_length": _byte_length,
    "octet_length": _byte_length,
    "concat": _concat,
    "substr": _substr,
    "trim": _trim("trim"),
    "ltrim": _trim("ltrim"),
    "rtrim": _trim("rtrim"),
    "lpad": _padded("lpad"),
    "rpad": _padded("rpad"),
    "replace": _of_text("bq.replace({0}, {1}, {2})"),
    "repeat": _of_text("bq.repeat({0}, {1})"),
    "reverse": _by_kind("bq.reverse({0})", "bq.reverse_bytes({0})"),
    "initcap": _initcap,
    "soundex": _of_text("bq.soundex({0})"),
    "left": _edge("left"),
    "right": _edge("right"),
    "starts_with": _with_edge("starts_with"),
    "ends_with": _with_edge("ends_with"),
    "strpos": _strpos,
    "split": _split,
    "regexp_contains": _regexp("regexp_matches({0}, {1})"),
    "regexp_extract": _regexp(
        "bq.regexp_extract({0}, {1}, 0)", "bq.regexp_extract_group({0}, {1})"
    ),
    "regexp_extract_all": _regexp_extract_all,
    "regexp_replace": _regexp_replace,
    "string": _string,
    "format": _format,
    "md5": lambda call: f"from_hex(md5({call.sql[0]}))",
    "sha1": lambda call: f"from_hex(sha1({call.sql[0]}))",
    "sha256": lambda call: f"from_hex(sha256({call.sql[0]}))",
    "to_hex": lambda call: f"lower(to_hex({call.sql[0]}))",
    "from_hex": "bq.from_hex({0})",
    "farm_fingerprint": _by_kind("bq_farm_fingerprint(encode({0}))", "bq_farm_fingerprint({0})"),
    "to_base64": lambda call: f"to_base64({call.sql[0]})",
    "from_base64": "bq.from_base64({0})",
    "generate_uuid": lambda call: "CAST(uuid() AS VARCHAR)",
    "ascii": _of_text("bq.ascii({0})"),
    "contains_substr": _contains_substr,
    "chr": "(CASE WHEN {0} = 0 THEN '' ELSE chr(CAST({0} AS INTEGER)) END)",
    "instr": _instr,
    "translate": _of_text("bq.translate({0}, {1}, {2})"),
    "unicode": _of_text("CAST(CASE WHEN {0} = '' THEN 0 ELSE unicode({0}) END AS BIGINT)"),
    "to_code_points": _by_kind("bq.code_points({0})", "bq.byte_points({0})"),
    "code_points_to_string": "bq.code_points_text({0})",
    "code_points_to_bytes": "bq.code_points_bytes({0})",
    "regexp_substr": _regexp("bq.regexp_extract({0}, {1}, 0)", "bq.regexp_extract_group({0}, {1})"),
    "regexp_instr": _regexp_instr,
}
