-- Usage by API key, model, and day.
-- owner: product
-- audience: tenants
-- plot: bars cost_usd by day, one color per key_id
-- totals: requests, refused, items, succeeded, cached, tokens, charged_tokens, pixel_steps, charged_pixel_steps, device_s, cost_usd
-- column day: day in the time zone; days without requests have no row
-- column tenant: the tenant
-- column key_id: public part of the API key; NULL if no key was required, and in rows from older releases
-- column model: model name in the catalog
-- column requests: requests, including rejected ones
-- column refused: rejected requests
-- column items: texts or images, excluding rejected requests
-- column succeeded: delivered items
-- column cached: delivered items that came from the cache or joined an identical item
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
    key_id,
    model,
    received_at,
    item,
    status,
    cache,
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
)
SELECT
  DATE(received_at, @tz) AS day,
  tenant,
  key_id,
  model,
  COUNTIF(item = 0) AS requests,
  COUNTIF(status = 'refused') AS refused,
  COUNTIF(status != 'refused') AS items,
  COUNTIF(status = 'succeeded') AS succeeded,
  COUNTIF(status = 'succeeded' AND cache IN ('memory', 'redis', 'joined')) AS cached,
  SUM(tokens) AS tokens,
  SUM(tokens * share) AS charged_tokens,
  SUM(pixel_steps) AS pixel_steps,
  SUM(pixel_steps * share) AS charged_pixel_steps,
  ROUND(SUM(device_s), 3) AS device_s,
  SUM(cost_usd) AS cost_usd
FROM once
GROUP BY day, tenant, key_id, model
ORDER BY day DESC, cost_usd DESC, items DESC, tenant, key_id, model
