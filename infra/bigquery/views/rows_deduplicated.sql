-- One row per row_id: rows are written at least once, and a job delivered twice writes its rows twice.
-- An item counts as succeeded only if all its rows agree: the API writes another row if the caller did not get the result.
-- received_at is part of the key only so that a filter on it selects partitions; it is equal in all copies of a row.
SELECT *
FROM `${project}.${dataset}.rows`
WHERE TRUE
QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
