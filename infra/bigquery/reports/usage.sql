-- What each tenant used of each model, per day: items, hits, refused requests, latencies, tokens, pixel-steps, device seconds, cost.
-- Charged tokens times the price of a token are the cost; tokens of hits and of joined items count as the catalog says.
-- The filter stands beside the table and not around the view, as a table that demands one wants it.
WITH once AS (
  SELECT
    *,
    -- Rows from before the column: what was charged was charged in full.
    COALESCE(charged_share, IF(cost_usd > 0, 1.0, 0.0)) AS share
  FROM `rows`
  WHERE received_at >= @since
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY attempt DESC, replied_at DESC) = 1
)
SELECT
  DATE(received_at) AS day,
  tenant,
  model,
  COUNTIF(status != 'refused') AS items,
  COUNT(DISTINCT request_id) AS requests,
  COUNTIF(status = 'refused') AS refused,
  COUNTIF(status = 'succeeded') AS succeeded,
  ROUND(100 * SAFE_DIVIDE(COUNTIF(cache IN ('memory', 'redis')), COUNTIF(status != 'refused')), 1) AS hit_percent,
  COUNTIF(cache = 'joined') AS joined,
  ROUND(APPROX_QUANTILES(queue_ms, 100)[SAFE_OFFSET(50)], 1) AS queue_p50_ms,
  ROUND(APPROX_QUANTILES(queue_ms, 100)[SAFE_OFFSET(95)], 1) AS queue_p95_ms,
  ROUND(APPROX_QUANTILES(inference_ms, 100)[SAFE_OFFSET(50)], 1) AS inference_p50_ms,
  ROUND(APPROX_QUANTILES(inference_ms, 100)[SAFE_OFFSET(95)], 1) AS inference_p95_ms,
  ROUND(APPROX_QUANTILES(IF(status = 'refused', NULL, total_ms), 100)[SAFE_OFFSET(50)], 1) AS total_p50_ms,
  ROUND(APPROX_QUANTILES(IF(status = 'refused', NULL, total_ms), 100)[SAFE_OFFSET(95)], 1) AS total_p95_ms,
  SUM(tokens) AS tokens,
  SUM(tokens * share) AS charged_tokens,
  SUM(pixel_steps) AS pixel_steps,
  SUM(pixel_steps * share) AS charged_pixel_steps,
  -- A batch's time belongs to its items in equal parts.
  ROUND(SUM(inference_ms / 1000 * device_share / batch_size), 3) AS device_s,
  -- Not rounded: sums of this one are to be right too. Doubles add a million rows to 10 digits and more.
  SUM(cost_usd) AS cost_usd
FROM once
GROUP BY day, tenant, model
ORDER BY day DESC, cost_usd DESC, items DESC, tenant, model
