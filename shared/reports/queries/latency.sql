-- Latency percentiles of each phase, by model.
-- owner: operations
-- audience: tenants
-- plot: bars p95_ms by model, one color per phase
-- column model: model name in the catalog
-- column phase: queue (at the broker), batch wait (in the worker), inference (the item's batch), total, or total of hits
-- column items: items that went through the phase
-- column mean_ms: mean
-- column p50_ms: median
-- column p90_ms: 90th percentile
-- column p95_ms: 95th percentile
-- column p99_ms: 99th percentile
-- column max_ms: maximum
WITH once AS (
  SELECT
    model,
    queue_ms,
    batch_wait_ms,
    inference_ms,
    total_ms,
    cache IN ('memory', 'redis') AS is_hit,
    status
  FROM `rows`
  WHERE received_at >= @since
    AND received_at < @until
    AND (ARRAY_LENGTH(@tenants) = 0 OR tenant IN UNNEST(@tenants))
    AND (ARRAY_LENGTH(@models) = 0 OR model IN UNNEST(@models))
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
),
phases AS (
  SELECT
    model,
    'queue' AS phase,
    1 AS place,
    COUNT(queue_ms) AS items,
    AVG(queue_ms) AS mean_ms,
    MAX(queue_ms) AS max_ms,
    APPROX_QUANTILES(queue_ms, 100) AS percentiles
  FROM once
  WHERE queue_ms IS NOT NULL
  GROUP BY model
  UNION ALL
  SELECT
    model,
    'batch wait' AS phase,
    2 AS place,
    COUNT(batch_wait_ms) AS items,
    AVG(batch_wait_ms) AS mean_ms,
    MAX(batch_wait_ms) AS max_ms,
    APPROX_QUANTILES(batch_wait_ms, 100) AS percentiles
  FROM once
  WHERE batch_wait_ms IS NOT NULL
  GROUP BY model
  UNION ALL
  SELECT
    model,
    'inference' AS phase,
    3 AS place,
    COUNT(inference_ms) AS items,
    AVG(inference_ms) AS mean_ms,
    MAX(inference_ms) AS max_ms,
    APPROX_QUANTILES(inference_ms, 100) AS percentiles
  FROM once
  WHERE inference_ms IS NOT NULL
  GROUP BY model
  UNION ALL
  SELECT
    model,
    'total' AS phase,
    4 AS place,
    COUNT(total_ms) AS items,
    AVG(total_ms) AS mean_ms,
    MAX(total_ms) AS max_ms,
    APPROX_QUANTILES(total_ms, 100) AS percentiles
  FROM once
  WHERE total_ms IS NOT NULL AND status != 'refused'
  GROUP BY model
  UNION ALL
  SELECT
    model,
    'total of hits' AS phase,
    5 AS place,
    COUNT(total_ms) AS items,
    AVG(total_ms) AS mean_ms,
    MAX(total_ms) AS max_ms,
    APPROX_QUANTILES(total_ms, 100) AS percentiles
  FROM once
  WHERE total_ms IS NOT NULL AND is_hit
  GROUP BY model
)
SELECT
  model,
  phase,
  items,
  ROUND(mean_ms, 1) AS mean_ms,
  ROUND(percentiles[SAFE_OFFSET(50)], 1) AS p50_ms,
  ROUND(percentiles[SAFE_OFFSET(90)], 1) AS p90_ms,
  ROUND(percentiles[SAFE_OFFSET(95)], 1) AS p95_ms,
  ROUND(percentiles[SAFE_OFFSET(99)], 1) AS p99_ms,
  ROUND(max_ms, 1) AS max_ms
FROM phases
ORDER BY model, place
