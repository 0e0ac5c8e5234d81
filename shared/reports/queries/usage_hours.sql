-- Usage by tenant, model, and hour.
-- owner: product
-- audience: tenants
-- plot: bars items by hour, one color per model
-- totals: requests, refused, items, succeeded, cached, tokens, pixel_steps, device_s, cost_usd
-- column hour: start of the hour (UTC)
-- column local_hour: the same time in the report's time zone
-- column tenant: the tenant
-- column model: model name in the catalog
-- column requests: requests, including rejected ones
-- column refused: rejected requests
-- column items: texts or images, excluding rejected requests
-- column succeeded: delivered items
-- column cached: delivered items that came from the cache or joined an identical item
-- column tokens: tokens of texts, charged or not
-- column pixel_steps: width x height x steps of images, charged or not
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
    tokens,
    pixel_steps,
    cost_usd,
    -- A batch's time is divided equally among its items.
    inference_ms / 1000 * device_share / batch_size AS device_s
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
hours AS (
  SELECT
    TIMESTAMP_TRUNC(received_at, HOUR) AS hour,
    tenant,
    model,
    COUNTIF(item = 0) AS requests,
    COUNTIF(status = 'refused') AS refused,
    COUNTIF(status != 'refused') AS items,
    COUNTIF(status = 'succeeded') AS succeeded,
    COUNTIF(status = 'succeeded' AND cache IN ('memory', 'redis', 'joined')) AS cached,
    SUM(tokens) AS tokens,
    SUM(pixel_steps) AS pixel_steps,
    ROUND(SUM(device_s), 3) AS device_s,
    SUM(cost_usd) AS cost_usd
  FROM once
  GROUP BY hour, tenant, model
)
SELECT
  hour,
  FORMAT_TIMESTAMP('%Y-%m-%d %H:%M', hour, @tz) AS local_hour,
  tenant,
  model,
  requests,
  refused,
  items,
  succeeded,
  cached,
  tokens,
  pixel_steps,
  device_s,
  cost_usd
FROM hours
ORDER BY hour DESC, cost_usd DESC, items DESC, tenant, model
