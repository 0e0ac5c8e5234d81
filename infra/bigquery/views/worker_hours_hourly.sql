-- Worker hours and GPU cost, by hour. For operators.
-- column day: UTC day that contains the hour; filter on it in each query
-- column hour: start of the hour (UTC)
-- column deployment: the workers' models as named in the catalog, joined with +
-- column models: the workers' models as named in rows, comma-separated
-- column region: region in which the workers run
-- column gpu_type: same as in the rows; NULL for a CPU
-- column spot: true for a spot node; NULL if unknown, in which case the on-demand price applies
-- column workers: worker processes
-- column busy_hours: whole-device hours spent on batches
-- column idle_hours: whole-device hours without work
-- column loading_hours: whole-device hours spent loading models
-- column items: items in the batches that finished
-- column batches: batches that finished
-- column cold_starts: model loads that finished
-- column cost_usd: hours times the price for the GPU type, provisioning (spot or on demand), region, and hour; NULL if the price is unknown
SELECT
  DATE(reported.hour) AS day,
  reported.hour AS hour,
  reported.deployment AS deployment,
  reported.models AS models,
  reported.region AS region,
  reported.gpu_type AS gpu_type,
  reported.spot AS spot,
  COUNT(DISTINCT reported.worker) AS workers,
  SUM(reported.busy_s * COALESCE(reported.device_share, 1)) / 3600 AS busy_hours,
  SUM(reported.idle_s * COALESCE(reported.device_share, 1)) / 3600 AS idle_hours,
  SUM(reported.loading_s * COALESCE(reported.device_share, 1)) / 3600 AS loading_hours,
  SUM(reported.items) AS items,
  SUM(reported.batches) AS batches,
  SUM(reported.cold_starts) AS cold_starts,
  SUM(
    (reported.busy_s + reported.idle_s + reported.loading_s) * COALESCE(reported.device_share, 1) / 3600
    * prices.usd_per_hour
  ) AS cost_usd
FROM (
  SELECT *
  FROM `${project}.${dataset}.worker_hours`
  WHERE TRUE
  QUALIFY ROW_NUMBER() OVER (PARTITION BY hour, row_id ORDER BY reported_at DESC) = 1
) AS reported
LEFT JOIN (
  SELECT
    gpu_type,
    spot,
    region,
    usd_per_hour,
    valid_from,
    has_several_gpus,
    LEAD(valid_from) OVER (PARTITION BY gpu_type, spot, region, has_several_gpus ORDER BY valid_from) AS valid_until
  FROM `${project}.${dataset}.gpu_prices`
) AS prices
  ON prices.gpu_type = reported.gpu_type
  AND prices.spot = COALESCE(reported.spot, FALSE)
  AND prices.region = reported.region
  AND prices.has_several_gpus = (COALESCE(reported.device_share, 1) > 1)
  AND prices.valid_from <= reported.hour
  AND (prices.valid_until IS NULL OR prices.valid_until > reported.hour)
GROUP BY day, hour, deployment, models, region, gpu_type, spot
