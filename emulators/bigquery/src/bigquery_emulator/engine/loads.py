"""Load jobs: load newline-delimited JSON, CSV, and Parquet files into a table.

The uploaded file is read in a thread, checked row by row against the schema, and added to the
destination atomically. Source:
https://docs.cloud.google.com/bigquery/docs/reference/rest/v2/Job#JobConfigurationLoad
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any

from bigquery_emulator.engine.job import BigQueryJob
from bigquery_emulator.engine.parquet import parquet_file
from bigquery_emulator.engine.service import BigQueryService
from bigquery_emulator.errors import InvalidError, UnsupportedError
from bigquery_emulator.tables.csv_lines import Cell, CsvForm, csv_lines
from bigquery_emulator.tables.destinations import (
    TableDestination,
    parse_destination,
    put_rows,
)
from bigquery_emulator.tables.detection import detect_schema
from bigquery_emulator.tables.records import RowReader
from bigquery_emulator.tables.rows import insert_rows
from bigquery_emulator.tables.schema import Json, Schema, parse_schema
from bigquery_emulator.tables.values import BadValueError, read_row

_CHUNK_ROWS = 5_000
_DETECTION_ROWS = 500
_SHOWN_PROBLEMS = 5
_GZIP_MAGIC = b"\x1f\x8b"
_DEFAULT_WRITE = "WRITE_APPEND"

# A row with its line number, or the reason it is invalid.
_Line = tuple[int, Json | str]


@dataclass
class _Loaded:
    rows: int = 0
    bad: int = 0


async def run_load(service: BigQueryService, file: IO[bytes], job: BigQueryJob) -> None:
    """Runs a load job.

    Args:
        file: the uploaded file, positioned at its start.
        job: the load job. Its `statistics.load` and `problems` are set here.

    Raises:
        ServiceError: the file, the schema, and the destination do not match.
    """
    config = job.configuration["load"]
    if config.get("sourceUris"):
        raise UnsupportedError("Loading from Cloud Storage: not supported by the embedded BigQuery")
    destination = parse_destination(config, _DEFAULT_WRITE)
    table = service.catalog.tables.get(destination.key)
    known = None if table is None else table.schema
    if config.get("sourceFormat") == "PARQUET":
        staged = await service.threads.query(
            _stage_parquet, service, config, file, known, job, interrupt=job.interrupt
        )
    else:
        staged = await service.threads.query(
            _stage_text, service, config, file, known, job, interrupt=job.interrupt
        )
    schema, physical, loaded = staged
    try:
        await service.threads.write_in_job(
            _put, service, destination, schema, physical, interrupt=job.interrupt
        )
    finally:
        await service.threads.tidy(service.queries.drop, physical)
    size_bytes = file.seek(0, io.SEEK_END)
    job.statistics["load"] = {
        "inputFiles": "1",
        "inputFileBytes": str(size_bytes),
        "outputRows": str(loaded.rows),
        "outputBytes": str(size_bytes),
        "badRecords": str(loaded.bad),
    }


def _put(
    service: BigQueryService, destination: TableDestination, schema: Schema, physical: str
) -> None:
    put_rows(service.store, service.catalog, destination, schema, physical)


def _stage_parquet(
    service: BigQueryService, config: Json, file: IO[bytes], known: Schema | None, job: BigQueryJob
) -> tuple[Schema, str, _Loaded]:
    job.begin()
    if config.get("writeDisposition") == "WRITE_TRUNCATE" and "$" not in str(
        config["destinationTable"]["tableId"]
    ):
        known = None
    with parquet_file(service.store, file) as parquet:
        schema = parquet.schema(config, known)
        physical = service.queries.stage(schema)
        try:
            with service.store.reading() as cursor:
                job.watch(cursor)
                return schema, physical, _Loaded(parquet.stage(cursor, config, schema, physical))
        except BaseException:
            service.queries.drop(physical)
            raise


def _stage_text(
    service: BigQueryService, config: Json, file: IO[bytes], known: Schema | None, job: BigQueryJob
) -> tuple[Schema, str, _Loaded]:
    job.begin()
    schema = _schema(config, file, known)
    physical = service.queries.stage(schema)
    try:
        return schema, physical, _stage(service, config, file, schema, physical, job)
    except BaseException:
        service.queries.drop(physical)
        raise


def _schema(config: Json, file: IO[bytes], known: Schema | None) -> Schema:
    if config.get("schema", {}).get("fields"):
        return parse_schema(config["schema"]["fields"])
    if config.get("autodetect") and (
        known is None or config.get("writeDisposition") == "WRITE_TRUNCATE"
    ):
        if _is_csv(config) and not config.get("skipLeadingRows"):
            # Schema detection takes the column names from the first line.
            config["skipLeadingRows"] = "1"
        rows = [
            row
            for _, row in islice(_read(config, file, None), _DETECTION_ROWS)
            if isinstance(row, dict)
        ]
        return detect_schema(rows)
    if known is None:
        raise InvalidError("No schema specified on job or table.")
    return known


def _stage(
    service: BigQueryService,
    config: Json,
    file: IO[bytes],
    schema: Schema,
    physical: str,
    job: BigQueryJob,
) -> _Loaded:
    loaded = _Loaded()
    most_bad = int(config.get("maxBadRecords") or 0)
    lines = _read(config, file, schema)
    reader = RowReader(schema, bool(config.get("ignoreUnknownValues")), takes_json=True)
    with service.store.reading() as cursor:
        job.watch(cursor)
        while chunk := list(islice(lines, _CHUNK_ROWS)):
            rows = []
            for number, line in chunk:
                checked = _checked(reader, line)
                if isinstance(checked, str):
                    loaded.bad += 1
                    _note(job, number, checked)
                else:
                    rows.append(checked)
            if loaded.bad > most_bad:
                kind = "CSV" if _is_csv(config) else "JSON"
                raise InvalidError(
                    f"Error while reading data, error message: {kind} table encountered too many"
                    f" errors, giving up. Rows: {loaded.rows + len(chunk)}; errors: {loaded.bad}."
                    " Please look into the errors[] collection for more details."
                )
            insert_rows(cursor, physical, schema, rows)
            loaded.rows += len(rows)
    return loaded


def _checked(reader: RowReader, line: Json | str) -> Json | str:
    if isinstance(line, str):
        return line
    try:
        return reader.canonical(line)
    except BadValueError as error:
        return error.message


def _note(job: BigQueryJob, number: int, message: str) -> None:
    if len(job.problems) < _SHOWN_PROBLEMS:
        text = f"Error while reading data, error message: {message} Line: {number}"
        job.problems.append({"reason": "invalid", "message": text})


def _is_csv(config: Json) -> bool:
    kind = config.get("sourceFormat") or "CSV"
    if kind not in ("CSV", "NEWLINE_DELIMITED_JSON"):
        raise UnsupportedError(f"Source format {kind}: not supported by the embedded BigQuery")
    return bool(kind == "CSV")


def _read(config: Json, file: IO[bytes], schema: Schema | None) -> Iterator[_Line]:
    """Yields the file's rows.

    `schema` names a CSV file's columns. Without it, the names are taken from the first line.
    """
    is_csv = _is_csv(config)
    file.seek(0)
    is_gzip = file.read(2) == _GZIP_MAGIC
    file.seek(0)
    raw = gzip.GzipFile(fileobj=file, mode="rb") if is_gzip else file
    encoding = {"ISO-8859-1": "latin-1"}.get(
        str(config.get("encoding") or "UTF-8").upper(), "utf-8"
    )
    text = io.TextIOWrapper(raw, encoding, errors="replace", newline="" if is_csv else None)
    try:
        yield from _csv_rows(config, text, schema) if is_csv else _json_rows(text)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidError(f"Error while reading data, error message: {error}") from error
    finally:
        # A later step reads the file again, and closing the wrapper would close it.
        text.detach()


def _json_rows(text: io.TextIOWrapper) -> Iterator[_Line]:
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            row = read_row(line)
        except ValueError as error:
            yield number, f"JSON parsing error in row: {error}."
            continue
        yield number, row if isinstance(row, dict) else "JSON object specified is not a record."


def _csv_rows(config: Json, text: io.TextIOWrapper, schema: Schema | None) -> Iterator[_Line]:
    delimiter = config.get("fieldDelimiter") or ","
    lines = csv_lines(
        text,
        CsvForm(
            {"tab": "\t", "\\t": "\t"}.get(delimiter, delimiter),
            config.get("quote", '"') or None,
            bool(config.get("allowQuotedNewlines")),
        ),
    )
    skipped = int(config.get("skipLeadingRows") or 0)
    header = list(islice(lines, max(skipped, 1 if schema is None else 0)))
    names = _header_names(header) if schema is None else [field.name for field in schema]
    text_names = {field.name for field in schema or () if field.type in ("STRING", "BYTES")}
    null = config.get("nullMarker") or ""
    for number, cells in lines:
        if isinstance(cells, str):
            yield number, cells
        elif not cells:
            continue
        elif len(cells) < len(names) and not config.get("allowJaggedRows"):
            yield (
                number,
                f"CSV table references column position {len(cells)}, but the line has less.",
            )
        elif len(cells) > len(names) and not config.get("ignoreUnknownValues"):
            yield number, "Too many values in row."
        else:
            yield number, _csv_row(names, cells, text_names, null)


def _header_names(header: list[tuple[int, list[Cell] | str]]) -> list[str]:
    last = header[-1][1] if header else []
    if isinstance(last, str):
        raise InvalidError(f"Error while reading data, error message: {last}")
    return [name.strip() for name, _ in last]


def _csv_row(names: list[str], cells: list[Cell], text_names: set[str], null: str) -> Json:
    row: dict[str, Any] = {}
    for name, (cell, is_quoted) in zip(names, cells, strict=False):
        # A quoted empty cell is an empty string, unless there is a custom marker for NULL.
        is_text = is_quoted and not null and name in text_names
        row[name] = None if cell == null and not is_text else cell
    return row
