-- Total usage by day, including days without requests.
-- owner: product
-- audience: tenants
-- plot: bars cost_usd by day
-- plot: lines requests by day
-- totals: requests, refused, items, succeeded, failed, expired, canceled, cached, tokens, pixel_steps, device_s, cost_usd
-- column day: day in the report's time zone
-- column hours: hours in the day: 23 or 25 when clocks change
-- column tenants: number of tenants that sent requests
-- column requests: requests, including rejected ones
-- column refused: rejected requests
-- column items: texts or images, excluding rejected requests
-- column succeeded: delivered items
-- column failed: items that failed
-- column expired: items that missed their deadline
-- column canceled: canceled items
-- column cached: delivered items that came from the cache or joined an identical item
-- column tokens: tokens of texts, charged or not
-- column pixel_steps: width x height x steps of images, charged or not
-- column device_s: whole-device seconds; a batch's time is divided equally among its items
-- column cost_usd: amount charged, not rounded
WITH once AS (
  SELECT
    tenant,
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
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
),
used AS (
  SELECT
    DATE(received_at, @tz) AS day,
    COUNT(DISTINCT tenant) AS tenants,
    COUNTIF(item = 0) AS requests,
    COUNTIF(status = 'refused') AS refused,
    COUNTIF(status != 'refused') AS items,
    COUNTIF(status = 'succeeded') AS succeeded,
    COUNTIF(status = 'failed') AS failed,
    COUNTIF(status = 'expired') AS expired,
    COUNTIF(status = 'canceled') AS canceled,
    COUNTIF(status = 'succeeded' AND cache IN ('memory', 'redis', 'joined')) AS cached,
    SUM(tokens) AS tokens,
    SUM(pixel_steps) AS pixel_steps,
    SUM(device_s) AS device_s,
    SUM(cost_usd) AS cost_usd
  FROM once
  GROUP BY day
)
SELECT
  day,
  TIMESTAMP_DIFF(TIMESTAMP(DATE_ADD(day, INTERVAL 1 DAY), @tz), TIMESTAMP(day, @tz), HOUR) AS hours,
  COALESCE(used.tenants, 0) AS tenants,
  COALESCE(used.requests, 0) AS requests,
  COALESCE(used.refused, 0) AS refused,
  COALESCE(used.items, 0) AS items,
  COALESCE(used.succeeded, 0) AS succeeded,
  COALESCE(used.failed, 0) AS failed,
  COALESCE(used.expired, 0) AS expired,
  COALESCE(used.canceled, 0) AS canceled,
  COALESCE(used.cached, 0) AS cached,
  COALESCE(used.tokens, 0) AS tokens,
  COALESCE(used.pixel_steps, 0) AS pixel_steps,
  ROUND(COALESCE(used.device_s, 0), 3) AS device_s,
  COALESCE(used.cost_usd, 0) AS cost_usd
FROM UNNEST(GENERATE_DATE_ARRAY(DATE(@since, @tz), DATE(TIMESTAMP_SUB(@until, INTERVAL 1 MICROSECOND), @tz))) AS day
LEFT JOIN used USING (day)
ORDER BY day DESC
