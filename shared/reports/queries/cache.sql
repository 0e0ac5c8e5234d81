-- Money and GPU time saved by the cache.
-- owner: product
-- audience: tenants
-- without: tz
-- plot: bars caller_saved_usd, gpu_saved_usd by model
-- totals: items, hits, joined, charged_usd, list_usd, caller_saved_usd, gpu_saved_s, gpu_saved_usd
-- column model: model name in the catalog
-- column items: delivered items
-- column hits: delivered items from the cache
-- column joined: delivered items that joined an identical item in flight
-- column hit_percent: percentage of delivered items that were hits or joined another item
-- column charged_usd: amount charged for hits and joined items, not rounded
-- column list_usd: list price of hits and joined items; for rows from older releases, the mean price of computed items
-- column caller_saved_usd: list_usd minus charged_usd
-- column gpu_saved_s: whole-device seconds: the number of units in hits and joined items times the mean time per computed unit
-- column gpu_usd_per_hour: mean list price of the GPUs that computed the model; NULL if it ran only on CPUs
-- column gpu_saved_usd: gpu_saved_s times the GPUs' mean list price
WITH once AS (
  SELECT
    model,
    region,
    gpu_type,
    COALESCE(spot, FALSE) AS spot,
    COALESCE(device_share, 1) > 1 AS has_several_gpus,
    cache,
    COALESCE(cache IN ('memory', 'redis', 'joined'), FALSE) AS is_shared,
    COALESCE(pixel_steps, tokens) AS units,
    -- Rows without the columns: the full price was charged.
    COALESCE(list_price_usd, SAFE_DIVIDE(cost_usd, COALESCE(charged_share, 1.0))) AS list_usd,
    list_price_usd IS NULL AS is_old,
    cost_usd,
    -- A batch's time is divided equally among its items. A joined item belongs to another item's batch.
    IF(cache = 'joined', NULL, inference_ms / 1000 * device_share / batch_size) AS device_s
  FROM `rows`
  WHERE received_at >= @since
    AND received_at < @until
    AND (ARRAY_LENGTH(@tenants) = 0 OR tenant IN UNNEST(@tenants))
    AND (ARRAY_LENGTH(@models) = 0 OR model IN UNNEST(@models))
    AND status = 'succeeded'
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
used AS (
  SELECT model, gpu_type, spot, region, has_several_gpus, SUM(device_s) AS device_s
  FROM once
  WHERE device_s > 0
  GROUP BY model, gpu_type, spot, region, has_several_gpus
),
gpus AS (
  SELECT used.model AS model, SAFE_DIVIDE(SUM(used.device_s * prices.usd_per_hour), SUM(used.device_s)) AS usd_per_hour
  FROM used
  JOIN prices
    ON prices.gpu_type = used.gpu_type
    AND prices.spot = used.spot
    AND prices.region = used.region
    AND prices.has_several_gpus = used.has_several_gpus
    AND prices.valid_from <= @until
    AND (prices.valid_until IS NULL OR prices.valid_until > @until)
  GROUP BY model
),
models AS (
  SELECT
    model,
    COUNT(*) AS items,
    COUNTIF(is_shared AND cache != 'joined') AS hits,
    COUNTIF(cache = 'joined') AS joined,
    SUM(IF(is_shared, cost_usd, 0)) AS charged_usd,
    SUM(IF(is_shared AND NOT is_old, list_usd, 0)) AS known_list_usd,
    SUM(IF(is_shared AND is_old, units, 0)) AS old_units,
    SAFE_DIVIDE(SUM(IF(is_shared, NULL, list_usd)), SUM(IF(is_shared, NULL, units))) AS usd_per_unit,
    SUM(IF(is_shared, units, 0)) AS saved_units,
    SAFE_DIVIDE(
      SUM(IF(is_shared, NULL, device_s)), SUM(IF(is_shared OR device_s IS NULL, NULL, units))
    ) AS s_per_unit
  FROM once
  GROUP BY model
)
SELECT
  model,
  items,
  hits,
  joined,
  ROUND(100 * SAFE_DIVIDE(hits + joined, items), 1) AS hit_percent,
  charged_usd,
  known_list_usd + COALESCE(old_units * usd_per_unit, 0) AS list_usd,
  known_list_usd + COALESCE(old_units * usd_per_unit, 0) - charged_usd AS caller_saved_usd,
  ROUND(saved_units * s_per_unit, 3) AS gpu_saved_s,
  ROUND(usd_per_hour, 6) AS gpu_usd_per_hour,
  saved_units * s_per_unit / 3600 * usd_per_hour AS gpu_saved_usd
FROM models
LEFT JOIN gpus USING (model)
ORDER BY caller_saved_usd DESC, model
