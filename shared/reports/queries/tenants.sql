-- Heaviest and most disruptive tenants by cost, device time, errors, rejections, and bursts.
-- owner: product
-- audience: operators
-- plot: bars cost_usd by tenant
-- plot: bars peak_to_mean by tenant
-- totals: cost_usd, items, requests, device_s
-- column tenant: the tenant; empty if a request was rejected before its key was read
-- column cost_usd: amount charged, not rounded
-- column cost_percent: percentage of all tenants' cost
-- column items: texts or images, excluding rejected requests
-- column requests: requests, including rejected ones
-- column device_s: whole-device seconds; a batch's time is divided equally among its items
-- column device_percent: percentage of all tenants' device seconds
-- column error_percent: percentage of items that failed or were late
-- column refused_percent: percentage of requests that were rejected
-- column peak_items_per_min: items in the tenant's busiest minute (UTC); a rejected request counts as one
-- column peak_to_mean: items in the busiest minute divided by the mean items per minute over the range
-- column models: number of models that the tenant used
-- column keys: number of keys that the tenant used
-- column last_seen: time of the tenant's last request
WITH once AS (
  SELECT
    COALESCE(tenant, '') AS tenant,
    model,
    key_id,
    received_at,
    item,
    status,
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
minutes AS (
  SELECT tenant, MAX(items) AS peak
  FROM (SELECT tenant, TIMESTAMP_TRUNC(received_at, MINUTE) AS minute, COUNT(*) AS items FROM once GROUP BY tenant, minute)
  GROUP BY tenant
),
totals AS (
  SELECT
    tenant,
    COUNT(*) AS lines,
    COUNTIF(status != 'refused') AS items,
    COUNTIF(item = 0) AS requests,
    COUNTIF(status = 'refused') AS refused,
    COUNTIF(status IN ('failed', 'expired')) AS errors,
    SUM(device_s) AS device_s,
    COALESCE(SUM(cost_usd), 0) AS cost_usd,
    COUNT(DISTINCT model) AS models,
    COUNT(DISTINCT key_id) AS keys,
    MAX(received_at) AS last_seen
  FROM once
  GROUP BY tenant
)
SELECT
  tenant,
  cost_usd,
  ROUND(100 * SAFE_DIVIDE(cost_usd, SUM(cost_usd) OVER ()), 2) AS cost_percent,
  items,
  requests,
  ROUND(device_s, 3) AS device_s,
  ROUND(100 * SAFE_DIVIDE(device_s, SUM(device_s) OVER ()), 2) AS device_percent,
  ROUND(100 * SAFE_DIVIDE(errors, items), 2) AS error_percent,
  ROUND(100 * SAFE_DIVIDE(refused, requests), 2) AS refused_percent,
  peak AS peak_items_per_min,
  ROUND(SAFE_DIVIDE(peak, lines / (TIMESTAMP_DIFF(@until, @since, SECOND) / 60)), 1) AS peak_to_mean,
  models,
  keys,
  last_seen
FROM totals
JOIN minutes USING (tenant)
ORDER BY cost_usd DESC, items DESC, tenant
