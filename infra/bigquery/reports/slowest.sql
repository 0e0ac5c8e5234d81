-- The 50 items that took longest, and where their time went.
WITH once AS (
  SELECT *
  FROM `rows`
  WHERE received_at >= @since
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY attempt DESC, replied_at DESC) = 1
)
SELECT
  row_id,
  received_at,
  tenant,
  model,
  status,
  cache,
  ROUND(total_ms, 1) AS total_ms,
  ROUND(queue_ms, 1) AS queue_ms,
  ROUND(batch_wait_ms, 1) AS batch_wait_ms,
  ROUND(inference_ms, 1) AS inference_ms,
  batch_size,
  worker,
  device,
  attempt
FROM once
WHERE total_ms IS NOT NULL
ORDER BY once.total_ms DESC, row_id
LIMIT 50
