"""The embedded BigQuery behind its HTTP routes: its parts, and how it runs jobs.

Routes call the service, which calls the catalog, the translator, and the queries in threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from bigquery_emulator.engine.definitions.definitions import Definitions
from bigquery_emulator.engine.definitions.text import query_text
from bigquery_emulator.engine.job import BigQueryJob
from bigquery_emulator.engine.jobs import Jobs
from bigquery_emulator.engine.query import OnCursor, Queries, Result, check_billed
from bigquery_emulator.errors import InvalidError, InvalidQueryError, UnsupportedError
from bigquery_emulator.googlesql.translate import Statement, Translator
from bigquery_emulator.store import Store
from bigquery_emulator.tables.catalog import TableCatalog
from bigquery_emulator.tables.destinations import parse_destination, put_rows
from bigquery_emulator.tables.partition_ids import partition_condition, undecorated
from bigquery_emulator.tables.resources import DatasetKey, TableKey
from bigquery_emulator.tables.rows import wire_rows
from bigquery_emulator.tables.schema import Json, Schema
from bigquery_emulator.threads import Threads

_Done = TypeVar("_Done")
_COUNTS = {"INSERT": "insertedRowCount", "UPDATE": "updatedRowCount", "DELETE": "deletedRowCount"}


@dataclass(frozen=True)
class BigQueryService:
    """A server's parts."""

    store: Store
    catalog: TableCatalog
    threads: Threads
    queries: Queries
    translator: Translator
    jobs: Jobs

    async def view_schema(self, sql: str, project: str) -> Schema:
        """Checks a view's query and returns its fields."""
        statement = await self.threads.read(self.translator.translate, sql, project, None, (), True)
        if statement.kind != "SELECT":
            raise InvalidQueryError("A view's query must be a SELECT")
        return statement.schema

    async def run_query(self, job: BigQueryJob) -> None:
        """Runs a query job.

        Raises:
            ServiceError: the query failed. The job stores the error.
        """
        config = job.configuration["query"]
        statement = await self._statement(job.project, config, config["query"])
        job.statistics["query"] = details = {"statementType": statement.kind, "cacheHit": False}
        if statement.kind == "SELECT":
            await self._select(job, config, statement)
        elif statement.definition is not None:
            await self._define(job, config, statement)
        else:
            affected = await self.threads.write_in_job(
                self._manipulate, job, statement, interrupt=job.interrupt
            )
            details["numDmlAffectedRows"] = str(affected)
            if statement.target is not None:
                # The service reports the destination table here, and dbt reads it.
                config["destinationTable"] = statement.target.resource()
            if statement.kind in _COUNTS:
                details["dmlStats"] = {_COUNTS[statement.kind]: str(affected)}

    async def dry_run(self, job: BigQueryJob) -> None:
        """Fills in a dry run's statistics: a query's fields and bytes, without running it."""
        config = job.configuration["query"]
        statement = await self._statement(job.project, config, config["query"])
        job.statistics["query"] = details = {"statementType": statement.kind, "cacheHit": False}
        if statement.kind == "SELECT":
            details["schema"] = {"fields": [field.resource() for field in statement.schema]}
        await self.threads.query(self._charge, job, statement, interrupt=job.interrupt)
        job.state = "DONE"

    async def run_copy(self, job: BigQueryJob) -> None:
        """Runs a copy job: copies one or more tables into another."""
        config = job.configuration["copy"]
        destination = parse_destination(config, "WRITE_EMPTY")
        sources = config.get("sourceTables") or [config["sourceTable"]]
        for position, source in enumerate(sources):
            key, partition_id = undecorated(
                TableKey(source["projectId"], source["datasetId"], source["tableId"])
            )
            table = self.catalog.table(key)
            if table.view_query is not None:
                raise InvalidError(f"{key} is a view and can't be copied")
            if not table.schema:
                raise InvalidError(f"Table {key} does not have a schema.")
            if table.has_partition_time and destination.partition_id is None:
                # The rows would move to the current partition.
                raise UnsupportedError(
                    f"Copying {key}, which is partitioned by ingestion time, other than partition "
                    "by partition: not supported by the embedded BigQuery"
                )
            names = ("timePartitioning", "rangePartitioning", "clustering")
            layout = {name: table.settings[name] for name in names if name in table.settings}
            write = destination.write if position == 0 else "WRITE_APPEND"
            into = replace(destination, write=write, adds_fields=False, settings=layout)
            rows = table.physical
            if partition_id is not None:
                within = partition_condition(table, partition_id)
                rows = f"(SELECT * FROM {table.physical} WHERE {within})"
            put = partial(put_rows, self.store, self.catalog, into, table.schema, rows)
            await self.threads.write_in_job(_begun, job, put, interrupt=job.interrupt)

    async def _statement(self, project: str, config: Json, sql: str) -> Statement:
        if config.get("useLegacySql", True):
            raise UnsupportedError(
                "Legacy SQL is not supported by the embedded BigQuery: set useLegacySql to false"
                " (bq: --use_legacy_sql=false)"
            )
        dataset = _default_dataset(project, config)
        parameters: Sequence[Any] = config.get("queryParameters") or ()
        return await self.threads.read(self.translator.translate, sql, project, dataset, parameters)

    async def _select(self, job: BigQueryJob, config: Json, statement: Statement) -> None:
        is_kept = bool(config.get("destinationTable"))
        select = self.queries.select_into_table if is_kept else self.queries.select
        job.result = result = await self._run_select(job, statement, select)
        if not is_kept:
            config["destinationTable"] = job.anonymous_table.resource()
            return
        destination = parse_destination(config, "WRITE_EMPTY")
        put = partial(
            put_rows, self.store, self.catalog, destination, result.schema, result.physical
        )
        await self.threads.write_in_job(put, interrupt=job.interrupt)

    async def _define(self, job: BigQueryJob, config: Json, statement: Statement) -> None:
        tree, sql = statement.definition, config["query"]
        assert tree is not None
        result = view_schema = None
        if statement.kind == "CREATE_VIEW":
            view_schema = await self.view_schema(query_text(sql), job.project)
        elif statement.kind == "CREATE_TABLE_AS_SELECT":
            inner = await self._statement(job.project, config, query_text(sql))
            result = await self._run_select(job, inner, self.queries.select_into_table)
        names = self.translator.names(job.project, _default_dataset(job.project, config))
        evaluate = partial(self._evaluate, job)
        definitions = Definitions(self.store, self.catalog, names, evaluate)
        try:
            define = partial(definitions.run, tree, sql, result, view_schema)
            defined = await self.threads.write_in_job(_begun, job, define, interrupt=job.interrupt)
        finally:
            if result is not None:
                await self.threads.tidy(self.queries.drop, result.physical)
        details = job.statistics["query"]
        details["ddlOperationPerformed"] = defined.operation
        if defined.dataset is not None:
            details["ddlTargetDataset"] = defined.dataset.resource()
        if defined.table is not None:
            details["ddlTargetTable"] = defined.table.resource()
            if result is not None:
                config["destinationTable"] = defined.table.resource()

    def _evaluate(self, job: BigQueryJob, expression: str) -> object:
        """Returns a constant expression's value in the API's JSON form."""
        statement = self.translator.translate(f"SELECT {expression}", "", None)
        if statement.kind != "SELECT" or statement.tables:
            raise InvalidQueryError(f"Not a constant expression: {expression}")
        values = self.queries.few_rows(statement, job.watch)
        if values is None:
            raise InvalidQueryError(f"The value of an expression is too long: {expression[:100]}")
        (row,) = wire_rows(statement.schema, values, is_micros=False)
        return row["f"][0]["v"]

    async def _run_select(
        self,
        job: BigQueryJob,
        statement: Statement,
        select: Callable[[Statement, OnCursor], Result],
    ) -> Result:
        def work() -> Result:
            job.begin()
            self._charge(job, statement)
            return select(statement, job.watch)

        return await self.threads.query(work, interrupt=job.interrupt)

    def _manipulate(self, job: BigQueryJob, statement: Statement) -> int:
        job.begin()
        self._charge(job, statement)
        return self.queries.manipulate(statement, job.watch)

    def _charge(self, job: BigQueryJob, statement: Statement) -> None:
        read_bytes = self.queries.read_size(statement).size_bytes
        limit = job.configuration["query"].get("maximumBytesBilled")
        billed = check_billed(read_bytes, None if limit is None else int(limit))
        job.statistics["totalBytesProcessed"] = str(read_bytes)
        job.statistics["query"] |= {
            "totalBytesProcessed": str(read_bytes),
            "totalBytesBilled": str(billed),
            "referencedTables": [table.key.resource() for table in statement.tables],
        }


def _begun(job: BigQueryJob, work: Callable[[], _Done]) -> _Done:
    job.begin()
    return work()


def _default_dataset(project: str, config: Json) -> DatasetKey | None:
    default = config.get("defaultDataset")
    return DatasetKey(default.get("projectId", project), default["datasetId"]) if default else None
