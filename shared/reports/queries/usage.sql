-- Usage and charges by tenant, model, and day.
-- owner: product
-- audience: tenants
-- plot: bars cost_usd by day, one color per model
-- totals: items, requests, refused, succeeded, joined, tokens, charged_tokens, pixel_steps, charged_pixel_steps, device_s, cost_usd
-- column day: day in the time zone; days without requests have no row
-- column tenant: the tenant
-- column model: model name in the catalog; empty if a request was rejected before its model was known
-- column items: texts or images, excluding rejected requests
-- column requests: requests, including rejected ones
-- column refused: rejected requests
-- column succeeded: delivered items
-- column hit_percent: percentage of items that came from the cache
-- column joined: items that joined an identical item in flight
-- column queue_p50_ms: median time spent at the broker
-- column queue_p95_ms: its 95th percentile
-- column inference_p50_ms: median time of the item's batch
-- column inference_p95_ms: its 95th percentile
-- column total_p50_ms: median time from receiving the request to replying, excluding rejected requests
-- column total_p95_ms: its 95th percentile
-- column tokens: tokens of texts, charged or not
-- column charged_tokens: tokens times the share that is charged; multiply by the token price to get the cost
-- column pixel_steps: width x height x steps of images, charged or not
-- column charged_pixel_steps: pixel-steps times the share that is charged
-- column device_s: whole-device seconds; a batch's time is divided equally among its items
-- column cost_usd: amount charged, not rounded
WITH matching AS (
  SELECT
    row_id,
    attempt,
    replied_at,
    tenant,
    model,
    received_at,
    item,
    status,
    cache,
    queue_ms,
    inference_ms,
    total_ms,
    tokens,
    pixel_steps,
    cost_usd,
    -- A batch's time is divided equally among its items.
    inference_ms / 1000 * device_share / batch_size AS device_s,
    -- Rows without the column: the full price was charged.
    COALESCE(charged_share, IF(cost_usd > 0, 1.0, 0.0)) AS share
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
),
sums AS (
  SELECT
    DATE(received_at, @tz) AS day,
    tenant,
    model,
    COUNTIF(status != 'refused') AS items,
    -- Each request has one item 0. Distinct request ids would be the same number, and cost a sort.
    COUNTIF(item = 0) AS requests,
    COUNTIF(status = 'refused') AS refused,
    COUNTIF(status = 'succeeded') AS succeeded,
    COUNTIF(cache IN ('memory', 'redis')) AS hits,
    COUNTIF(cache = 'joined') AS joined,
    APPROX_QUANTILES(queue_ms, 100) AS queue_ms,
    APPROX_QUANTILES(inference_ms, 100) AS inference_ms,
    APPROX_QUANTILES(IF(status = 'refused', NULL, total_ms), 100) AS total_ms,
    SUM(tokens) AS tokens,
    SUM(tokens * share) AS charged_tokens,
    SUM(pixel_steps) AS pixel_steps,
    SUM(pixel_steps * share) AS charged_pixel_steps,
    SUM(device_s) AS device_s,
    -- Doubles add a million rows to 10 digits and more.
    SUM(cost_usd) AS cost_usd
  FROM once
  GROUP BY day, tenant, model
)
SELECT
  day,
  tenant,
  model,
  items,
  requests,
  refused,
  succeeded,
  ROUND(100 * SAFE_DIVIDE(hits, items), 1) AS hit_percent,
  joined,
  ROUND(queue_ms[SAFE_OFFSET(50)], 1) AS queue_p50_ms,
  ROUND(queue_ms[SAFE_OFFSET(95)], 1) AS queue_p95_ms,
  ROUND(inference_ms[SAFE_OFFSET(50)], 1) AS inference_p50_ms,
  ROUND(inference_ms[SAFE_OFFSET(95)], 1) AS inference_p95_ms,
  ROUND(total_ms[SAFE_OFFSET(50)], 1) AS total_p50_ms,
  ROUND(total_ms[SAFE_OFFSET(95)], 1) AS total_p95_ms,
  tokens,
  charged_tokens,
  pixel_steps,
  charged_pixel_steps,
  ROUND(device_s, 3) AS device_s,
  cost_usd
FROM sums
ORDER BY day DESC, cost_usd DESC, items DESC, tenant, model
