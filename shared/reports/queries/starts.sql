-- How long workers take to start, by model and phase.
-- owner: operations
-- audience: operators
-- without: tenants, tz
-- plot: bars p50_s, p95_s by phase, one color per model
-- column model: model name in the catalog
-- column phase: column of worker_starts without _s, or total (ready_s)
-- column starts: worker processes that started in the range
-- column measured: starts that measured the phase
-- column p50_s: median duration; NULL if not measured
-- column p95_s: its 95th percentile
-- column max_s: the maximum
-- Phases may overlap. A worker with several models counts for each of them.
WITH once AS (
  SELECT
    models,
    node_s,
    image_s,
    weights_s,
    backend_s,
    load_s,
    compile_s,
    ready_s,
    first_batch_s
  FROM worker_starts
  WHERE started_at >= @since
    AND started_at < @until
  QUALIFY ROW_NUMBER() OVER (PARTITION BY started_at, row_id ORDER BY reported_at DESC) = 1
),
phases AS (
  SELECT models, 1 AS place, 'node' AS phase, node_s AS took_s FROM once
  UNION ALL
  SELECT models, 2, 'image', image_s FROM once
  UNION ALL
  SELECT models, 3, 'weights', weights_s FROM once
  UNION ALL
  SELECT models, 4, 'backend', backend_s FROM once
  UNION ALL
  SELECT models, 5, 'load', load_s FROM once
  UNION ALL
  SELECT models, 6, 'compile', compile_s FROM once
  UNION ALL
  SELECT models, 7, 'total', ready_s FROM once
  UNION ALL
  SELECT models, 8, 'first batch', first_batch_s FROM once
),
sums AS (
  SELECT
    model,
    place,
    phase,
    COUNT(*) AS starts,
    COUNT(took_s) AS measured,
    APPROX_QUANTILES(took_s, 100) AS took_s,
    MAX(took_s) AS max_s
  FROM phases
  CROSS JOIN UNNEST(SPLIT(models, ',')) AS model
  WHERE ARRAY_LENGTH(@models) = 0 OR model IN UNNEST(@models)
  GROUP BY model, place, phase
)
SELECT
  model,
  phase,
  starts,
  measured,
  ROUND(took_s[SAFE_OFFSET(50)], 3) AS p50_s,
  ROUND(took_s[SAFE_OFFSET(95)], 3) AS p95_s,
  ROUND(max_s, 3) AS max_s
FROM sums
ORDER BY model, place
