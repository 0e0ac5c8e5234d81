-- What each tenant used of each model, per day: items, hits, latencies, tokens, pixel-steps, GPU seconds, cost.
-- The filter stands beside the table and not around the view, as a table that demands one wants it.
WITH once AS (
  SELECT *
  FROM `rows`
  WHERE received_at >= @since
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY attempt DESC, replied_at DESC) = 1
)
SELECT
  DATE(received_at) AS day,
  tenant,
  model,
  COUNT(*) AS items,
  COUNT(DISTINCT request_id) AS requests,
  COUNTIF(status = 'succeeded') AS succeeded,
  ROUND(100 * SAFE_DIVIDE(COUNTIF(cache IN ('memory', 'redis')), COUNT(*)), 1) AS hit_percent,
  COUNTIF(cache = 'joined') AS joined,
  ROUND(APPROX_QUANTILES(queue_ms, 100)[SAFE_OFFSET(50)], 1) AS queue_p50_ms,
  ROUND(APPROX_QUANTILES(queue_ms, 100)[SAFE_OFFSET(95)], 1) AS queue_p95_ms,
  ROUND(APPROX_QUANTILES(inference_ms, 100)[SAFE_OFFSET(50)], 1) AS inference_p50_ms,
  ROUND(APPROX_QUANTILES(inference_ms, 100)[SAFE_OFFSET(95)], 1) AS inference_p95_ms,
  ROUND(APPROX_QUANTILES(total_ms, 100)[SAFE_OFFSET(50)], 1) AS total_p50_ms,
  ROUND(APPROX_QUANTILES(total_ms, 100)[SAFE_OFFSET(95)], 1) AS total_p95_ms,
  SUM(tokens) AS tokens,
  SUM(pixel_steps) AS pixel_steps,
  -- A batch's time belongs to its items in equal parts.
  ROUND(SUM(inference_ms / 1000 * device_share / batch_size), 3) AS device_s,
  ROUND(SUM(cost_usd), 6) AS cost_usd
FROM once
GROUP BY day, tenant, model
ORDER BY day DESC, cost_usd DESC, items DESC, tenant, model
