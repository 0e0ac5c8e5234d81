-- One row per row_id: reports are written at least once. hour is part of the key only so that a filter on it reaches the
-- partitions; copies of a row have the same.
SELECT *
FROM `${project}.${dataset}.worker_hours`
WHERE TRUE
QUALIFY ROW_NUMBER() OVER (PARTITION BY hour, row_id ORDER BY reported_at DESC) = 1
