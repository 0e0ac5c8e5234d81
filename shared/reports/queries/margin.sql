-- Revenue, GPU cost, and margin by model, including idle and loading time.
-- owner: finance
-- audience: operators
-- without: tenants, tz
-- plot: bars revenue_usd, busy_usd, idle_usd, loading_usd by model
-- totals: revenue_usd, items, device_s, gpu_hours, busy_hours, idle_hours, loading_hours, cost_usd, busy_usd, idle_usd, loading_usd, unpriced_hours
-- column model: model name in the catalog
-- column revenue_usd: amount charged, not rounded
-- column items: delivered items
-- column device_s: whole-device seconds, according to the rows
-- column gpu_hours: the workers' whole-device hours, from worker_hours; NULL if the workers did not report
-- column busy_hours: the part of gpu_hours spent on batches
-- column idle_hours: the part of gpu_hours without work
-- column loading_hours: the part of gpu_hours spent loading models
-- column cost_usd: gpu_hours times the price for the GPU type, provisioning (spot or on demand), region, and hour, not rounded; NULL if the price is unknown
-- column busy_usd: cost of busy_hours
-- column idle_usd: cost of idle_hours
-- column loading_usd: cost of loading_hours
-- column unpriced_hours: device hours without a price, such as for CPUs; not included in the cost
-- column margin_usd: revenue minus cost; NULL if the cost is unknown
-- column margin_percent: margin as a percentage of the revenue
-- If a worker has several models, its time is divided in proportion to their device seconds on that worker, or equally
-- if it computed nothing in the range. A worker report belongs to the range in which it starts. A worker counts as on
-- demand unless it reports that its node is a spot node.
WITH once AS (
  SELECT
    model,
    worker,
    status,
    cost_usd,
    -- A batch's time is divided equally among its items. A joined item belongs to another item's batch.
    IF(cache = 'joined', NULL, inference_ms / 1000 * device_share / batch_size) AS device_s
  FROM `rows`
  WHERE received_at >= @since
    AND received_at < @until
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
),
prices AS (
  SELECT
    gpu_type,
    spot,
    region,
    usd_per_hour,
    valid_from,
    has_several_gpus,
    LEAD(valid_from) OVER (PARTITION BY gpu_type, spot, region, has_several_gpus ORDER BY valid_from) AS valid_until
  FROM gpu_prices
),
reports AS (
  SELECT
    worker,
    models,
    hour,
    gpu_type,
    COALESCE(spot, FALSE) AS spot,
    region,
    COALESCE(device_share, 1) > 1 AS has_several_gpus,
    busy_s * COALESCE(device_share, 1) / 3600 AS busy_hours,
    idle_s * COALESCE(device_share, 1) / 3600 AS idle_hours,
    loading_s * COALESCE(device_share, 1) / 3600 AS loading_hours
  FROM worker_hours
  WHERE hour >= TIMESTAMP_TRUNC(@since, HOUR)
    AND hour < @until
    AND since >= @since
    AND since < @until
  QUALIFY ROW_NUMBER() OVER (PARTITION BY hour, row_id ORDER BY reported_at DESC) = 1
),
workers AS (
  SELECT
    worker,
    models,
    SUM(busy_hours) AS busy_hours,
    SUM(idle_hours) AS idle_hours,
    SUM(loading_hours) AS loading_hours,
    SUM(busy_hours * usd_per_hour) AS busy_usd,
    SUM(idle_hours * usd_per_hour) AS idle_usd,
    SUM(loading_hours * usd_per_hour) AS loading_usd,
    SUM(IF(usd_per_hour IS NULL, busy_hours + idle_hours + loading_hours, 0)) AS unpriced_hours
  FROM reports
  LEFT JOIN prices
    ON prices.gpu_type = reports.gpu_type
    AND prices.spot = reports.spot
    AND prices.region = reports.region
    AND prices.has_several_gpus = reports.has_several_gpus
    -- The oldest price also applies to the time before it.
    AND prices.valid_from <= reports.hour
    AND (prices.valid_until IS NULL OR prices.valid_until > reports.hour)
  GROUP BY worker, models
),
computed AS (
  SELECT worker, model, SUM(device_s) AS device_s
  FROM once
  WHERE device_s > 0
  GROUP BY worker, model
),
parts AS (
  SELECT
    worker,
    models,
    model,
    computed.device_s AS device_s,
    SUM(computed.device_s) OVER (PARTITION BY worker, models) AS worker_device_s,
    COUNT(*) OVER (PARTITION BY worker, models) AS worker_models
  FROM workers
  CROSS JOIN UNNEST(SPLIT(models, ',')) AS model
  LEFT JOIN computed USING (worker, model)
),
shares AS (
  SELECT
    worker,
    models,
    model,
    IF(worker_device_s > 0, COALESCE(device_s, 0) / worker_device_s, 1 / worker_models) AS part
  FROM parts
),
costs AS (
  SELECT
    model,
    SUM(part * (busy_hours + idle_hours + loading_hours)) AS gpu_hours,
    SUM(part * busy_hours) AS busy_hours,
    SUM(part * idle_hours) AS idle_hours,
    SUM(part * loading_hours) AS loading_hours,
    SUM(part * busy_usd) AS busy_usd,
    SUM(part * idle_usd) AS idle_usd,
    SUM(part * loading_usd) AS loading_usd,
    SUM(part * unpriced_hours) AS unpriced_hours
  FROM shares
  JOIN workers USING (worker, models)
  GROUP BY model
),
revenues AS (
  SELECT
    model,
    SUM(cost_usd) AS revenue_usd,
    COUNTIF(status = 'succeeded') AS items,
    SUM(device_s) AS device_s
  FROM once
  WHERE model != ''
  GROUP BY model
)
SELECT
  model,
  COALESCE(revenue_usd, 0) AS revenue_usd,
  COALESCE(items, 0) AS items,
  ROUND(COALESCE(device_s, 0), 3) AS device_s,
  ROUND(gpu_hours, 4) AS gpu_hours,
  ROUND(busy_hours, 4) AS busy_hours,
  ROUND(idle_hours, 4) AS idle_hours,
  ROUND(loading_hours, 4) AS loading_hours,
  busy_usd + idle_usd + loading_usd AS cost_usd,
  busy_usd,
  idle_usd,
  loading_usd,
  ROUND(unpriced_hours, 4) AS unpriced_hours,
  COALESCE(revenue_usd, 0) - (busy_usd + idle_usd + loading_usd) AS margin_usd,
  ROUND(100 * (1 - SAFE_DIVIDE(busy_usd + idle_usd + loading_usd, revenue_usd)), 1) AS margin_percent
FROM revenues
FULL JOIN costs USING (model)
WHERE ARRAY_LENGTH(@models) = 0 OR model IN UNNEST(@models)
ORDER BY revenue_usd DESC, model
