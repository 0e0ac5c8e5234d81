-- One row per row_id: rows are written at least once. delivered_at is part of the key only so that a filter on it reaches
-- the partitions; copies of a row have the same.
SELECT *
FROM `${project}.${dataset}.webhook_deliveries`
WHERE TRUE
QUALIFY ROW_NUMBER() OVER (PARTITION BY delivered_at, row_id ORDER BY attempt DESC) = 1
