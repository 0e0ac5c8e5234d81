-- Usage by tenant, flow, and day, for each whole flow and for each of its steps.
-- owner: product
-- audience: tenants
-- plot: bars cost_usd by day, one color per flow
-- column day: day in the time zone; days without runs have no row
-- column tenant: the tenant
-- column flow: flow name in the catalog
-- column step: step ID; empty in the row for the whole flow
-- column runs: runs that reached this step
-- column items: items in the step, or in all steps for the whole flow
-- column succeeded: delivered items
-- column hit_percent: percentage of items that came from the cache
-- column joined: items that joined an identical item in flight
-- column inference_p50_ms: median time of the item's batch
-- column inference_p95_ms: its 95th percentile
-- column done_p50_ms: median time from a run's arrival until the last item in the step or flow was done
-- column done_p95_ms: its 95th percentile
-- column device_s: whole-device seconds; a batch's time is divided equally among its items
-- column cost_usd: amount charged, not rounded
WITH matching AS (
  SELECT
    received_at,
    row_id,
    attempt,
    replied_at,
    DATE(received_at, @tz) AS day,
    tenant,
    flow,
    step,
    request_id,
    status,
    cache,
    inference_ms,
    total_ms,
    inference_ms / 1000 * device_share / batch_size AS device_s,
    cost_usd
  FROM `rows`
  WHERE received_at >= @since
    AND received_at < @until
    AND flow IS NOT NULL
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
counted AS (
  SELECT day, tenant, flow, step, request_id, status, cache, inference_ms, total_ms, device_s, cost_usd
  FROM once
  UNION ALL
  SELECT day, tenant, flow, '' AS step, request_id, status, cache, inference_ms, total_ms, device_s, cost_usd
  FROM once
),
-- The last item in a run, or in its step, determines the time of the run.
timed AS (
  SELECT
    *,
    IF(
      ROW_NUMBER() OVER (PARTITION BY day, tenant, flow, step, request_id ORDER BY total_ms DESC) = 1,
      total_ms,
      NULL
    ) AS done_ms
  FROM counted
),
sums AS (
  SELECT
    day,
    tenant,
    flow,
    step,
    COUNT(DISTINCT request_id) AS runs,
    COUNT(*) AS items,
    COUNTIF(status = 'succeeded') AS succeeded,
    COUNTIF(cache IN ('memory', 'redis')) AS hits,
    COUNTIF(cache = 'joined') AS joined,
    APPROX_QUANTILES(inference_ms, 100) AS inference_ms,
    APPROX_QUANTILES(done_ms, 100) AS done_ms,
    SUM(device_s) AS device_s,
    SUM(cost_usd) AS cost_usd
  FROM timed
  GROUP BY day, tenant, flow, step
)
SELECT
  day,
  tenant,
  flow,
  step,
  runs,
  items,
  succeeded,
  ROUND(100 * SAFE_DIVIDE(hits, items), 1) AS hit_percent,
  joined,
  ROUND(inference_ms[SAFE_OFFSET(50)], 1) AS inference_p50_ms,
  ROUND(inference_ms[SAFE_OFFSET(95)], 1) AS inference_p95_ms,
  ROUND(done_ms[SAFE_OFFSET(50)], 1) AS done_p50_ms,
  ROUND(done_ms[SAFE_OFFSET(95)], 1) AS done_p95_ms,
  ROUND(device_s, 3) AS device_s,
  cost_usd
FROM sums
ORDER BY day DESC, tenant, flow, step = '' DESC, cost_usd DESC, step
