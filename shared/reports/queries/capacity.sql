-- Load and number of GPUs needed for each hour of the week.
-- owner: operations
-- audience: operators
-- plot: heat gpus_max by hour and weekday
-- column weekday: day of the week in the time zone, where 1 is Monday
-- column hour: hour of the day in the time zone, from 0 to 23
-- column hours: how many times this hour of the week occurs in the range, including occurrences without requests
-- column items_mean: mean number of texts or images per occurrence of this hour
-- column items_max: the maximum
-- column refused_mean: mean number of rejected requests per occurrence of this hour
-- column gpus_mean: mean number of fully busy devices in this hour: device seconds divided by 3,600
-- column gpus_max: the maximum
-- column queue_p95_ms: 95th percentile of the time spent at the broker in the worst occurrence of this hour
-- Request whole days, because the first and last hours of the range may be incomplete. Hours start on the hour in UTC,
-- so in a time zone with a half-hour offset, they start on the half hour.
WITH once AS (
  SELECT
    received_at,
    status,
    queue_ms,
    -- A batch's time is divided equally among its items. A joined item belongs to another item's batch.
    IF(cache = 'joined', NULL, inference_ms / 1000 * device_share / batch_size) AS device_s
  FROM `rows`
  WHERE received_at >= @since
    AND received_at < @until
    AND (ARRAY_LENGTH(@tenants) = 0 OR tenant IN UNNEST(@tenants))
    AND (ARRAY_LENGTH(@models) = 0 OR model IN UNNEST(@models))
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
),
used AS (
  SELECT
    TIMESTAMP_TRUNC(received_at, HOUR) AS moment,
    COUNTIF(status != 'refused') AS items,
    COUNTIF(status = 'refused') AS refused,
    SUM(device_s) / 3600 AS gpus,
    APPROX_QUANTILES(queue_ms, 100)[SAFE_OFFSET(95)] AS queue_p95_ms
  FROM once
  GROUP BY moment
),
grid AS (
  SELECT
    moment,
    MOD(EXTRACT(DAYOFWEEK FROM DATE(moment, @tz)) + 5, 7) + 1 AS weekday,
    EXTRACT(HOUR FROM DATETIME(moment, @tz)) AS hour
  FROM UNNEST(GENERATE_TIMESTAMP_ARRAY(
    TIMESTAMP_TRUNC(@since, HOUR), TIMESTAMP_SUB(@until, INTERVAL 1 MICROSECOND), INTERVAL 1 HOUR
  )) AS moment
)
SELECT
  weekday,
  hour,
  COUNT(*) AS hours,
  ROUND(AVG(COALESCE(items, 0)), 1) AS items_mean,
  MAX(COALESCE(items, 0)) AS items_max,
  ROUND(AVG(COALESCE(refused, 0)), 1) AS refused_mean,
  ROUND(AVG(COALESCE(gpus, 0)), 4) AS gpus_mean,
  ROUND(MAX(COALESCE(gpus, 0)), 4) AS gpus_max,
  ROUND(MAX(queue_p95_ms), 1) AS queue_p95_ms
FROM grid
LEFT JOIN used USING (moment)
GROUP BY weekday, hour
ORDER BY weekday, hour
