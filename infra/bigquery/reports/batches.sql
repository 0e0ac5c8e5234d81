-- How full the batches of each model are, per hour, and what an item of them costs in time.
WITH once AS (
  SELECT *
  FROM `rows`
  WHERE received_at >= @since
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY attempt DESC, replied_at DESC) = 1
)
SELECT
  TIMESTAMP_TRUNC(started_at, HOUR) AS hour,
  model,
  COUNT(DISTINCT worker) AS workers,
  COUNT(*) AS items,
  ROUND(SUM(1 / batch_size), 1) AS batches,
  ROUND(SAFE_DIVIDE(COUNT(*), SUM(1 / batch_size)), 2) AS items_per_batch,
  ROUND(APPROX_QUANTILES(batch_wait_ms, 100)[SAFE_OFFSET(95)], 1) AS batch_wait_p95_ms,
  ROUND(AVG(inference_ms / batch_size), 3) AS inference_ms_per_item
FROM once
WHERE started_at IS NOT NULL AND batch_size > 0
GROUP BY hour, model
ORDER BY hour DESC, model
