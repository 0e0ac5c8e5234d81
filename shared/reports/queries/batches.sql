-- Batch size, padding, and time per item, by model and hour.
-- owner: operations
-- audience: operators
-- plot: lines fill_percent by hour, one color per model
-- totals: items, batches
-- column hour: hour in which the batch started (UTC)
-- column model: model name in the catalog
-- column workers: number of workers that ran batches
-- column items: items in batches
-- column batches: batches
-- column items_per_batch: mean
-- column fill_percent: number of items as a percentage of these batches' maximum; NULL in rows from older releases
-- column padding_percent: percentage of computed tokens that are padding; NULL for images and in older rows
-- column cold_percent: percentage of items that waited for a model to load; NULL in older rows
-- column batch_wait_p95_ms: 95th percentile of the time that an item spent in the worker before its batch started
-- column inference_ms_per_item: batch time divided by the number of items
WITH matching AS (
  SELECT
    received_at,
    row_id,
    status,
    attempt,
    replied_at,
    model,
    worker,
    started_at,
    batch_size,
    batch_capacity,
    cache,
    tokens,
    padded_tokens,
    cold_start,
    batch_wait_ms,
    inference_ms
  FROM `rows`
  WHERE received_at >= @since
    AND received_at < @until
    AND (ARRAY_LENGTH(@tenants) = 0 OR tenant IN UNNEST(@tenants))
    AND (ARRAY_LENGTH(@models) = 0 OR model IN UNNEST(@models))
),
-- Few rows exist twice. Finding these first is faster than sorting the copies of all rows.
doubles AS (
  SELECT row_id
  FROM matching
  GROUP BY received_at, row_id
  HAVING COUNT(*) > 1
),
once AS (
  SELECT *
  FROM matching
  WHERE row_id NOT IN (SELECT row_id FROM doubles)
  UNION ALL
  SELECT *
  FROM matching
  WHERE row_id IN (SELECT row_id FROM doubles)
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
)
SELECT
  TIMESTAMP_TRUNC(started_at, HOUR) AS hour,
  model,
  COUNT(DISTINCT worker) AS workers,
  COUNT(*) AS items,
  ROUND(SUM(1 / batch_size), 1) AS batches,
  ROUND(SAFE_DIVIDE(COUNT(*), SUM(1 / batch_size)), 2) AS items_per_batch,
  ROUND(100 * SAFE_DIVIDE(COUNT(batch_capacity), SUM(batch_capacity / batch_size)), 1) AS fill_percent,
  ROUND(100 * (1 - SAFE_DIVIDE(SUM(IF(padded_tokens IS NULL, NULL, tokens)), SUM(padded_tokens))), 1) AS padding_percent,
  ROUND(100 * SAFE_DIVIDE(COUNTIF(cold_start), COUNT(cold_start)), 2) AS cold_percent,
  ROUND(APPROX_QUANTILES(batch_wait_ms, 100)[SAFE_OFFSET(95)], 1) AS batch_wait_p95_ms,
  ROUND(AVG(inference_ms / batch_size), 3) AS inference_ms_per_item
FROM once
-- A joined item belongs to another item's batch.
WHERE started_at IS NOT NULL AND batch_size > 0 AND cache IS DISTINCT FROM 'joined'
GROUP BY hour, model
ORDER BY hour DESC, model
