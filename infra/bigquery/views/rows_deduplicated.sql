-- One row per row_id: rows are written at least once, and a job delivered twice writes its rows twice.
-- An item counts as succeeded only if all its rows say so: the API writes another one if its caller did not get the result.
-- received_at is part of the key only so that a filter on it reaches the partitions; copies of a row have the same.
SELECT *
FROM `${project}.${dataset}.rows`
WHERE TRUE
QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
