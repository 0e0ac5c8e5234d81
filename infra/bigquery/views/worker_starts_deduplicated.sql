-- One row per row_id: rows are written at least once.
SELECT *
FROM `${project}.${dataset}.worker_starts`
WHERE TRUE
QUALIFY ROW_NUMBER() OVER (PARTITION BY started_at, row_id ORDER BY reported_at DESC) = 1
