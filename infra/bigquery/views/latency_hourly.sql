-- Latency of delivered items by hour and phase, as approximate percentiles, which can't be added up or averaged.
-- column day: UTC day that contains the hour; filter on it in each query
-- column hour: start of the hour (UTC)
-- column model: model name in the catalog
-- column priority: interactive or batch; NULL in rows from older releases
-- column items: delivered items
-- column total_p50_ms: median time from receiving the request to replying, excluding rejected requests
-- column total_p95_ms: its 95th percentile
-- column total_p99_ms: 99th percentile of the time from receiving the request to replying
-- column queue_p50_ms: median time spent at the broker
-- column queue_p95_ms: its 95th percentile
-- column batch_wait_p50_ms: median time from when an item is pulled until its batch starts
-- column batch_wait_p95_ms: its 95th percentile
-- column inference_p50_ms: median time of the item's batch
-- column inference_p95_ms: its 95th percentile
SELECT
  DATE(received_at) AS day,
  TIMESTAMP_TRUNC(received_at, HOUR) AS hour,
  model,
  priority,
  COUNT(*) AS items,
  APPROX_QUANTILES(total_ms, 100)[OFFSET(50)] AS total_p50_ms,
  APPROX_QUANTILES(total_ms, 100)[OFFSET(95)] AS total_p95_ms,
  APPROX_QUANTILES(total_ms, 100)[OFFSET(99)] AS total_p99_ms,
  APPROX_QUANTILES(queue_ms, 100)[OFFSET(50)] AS queue_p50_ms,
  APPROX_QUANTILES(queue_ms, 100)[OFFSET(95)] AS queue_p95_ms,
  APPROX_QUANTILES(batch_wait_ms, 100)[OFFSET(50)] AS batch_wait_p50_ms,
  APPROX_QUANTILES(batch_wait_ms, 100)[OFFSET(95)] AS batch_wait_p95_ms,
  APPROX_QUANTILES(inference_ms, 100)[OFFSET(50)] AS inference_p50_ms,
  APPROX_QUANTILES(inference_ms, 100)[OFFSET(95)] AS inference_p95_ms
FROM (
  SELECT *
  FROM `${project}.${dataset}.rows`
  WHERE ${only}
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
)
WHERE status = 'succeeded'
GROUP BY day, hour, model, priority
