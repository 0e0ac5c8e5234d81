-- GPUs needed in each hour of the next week, forecast from previous weeks.
-- owner: operations
-- audience: operators
-- days: 42
-- plot: lines gpus, gpus_high, week_ago_gpus by hour
-- column hour: start of the hour (UTC)
-- column local_hour: the same time in the report's time zone
-- column weeks: number of whole weeks, counted back from the end of the range, that the forecast uses
-- column gpus: expected device seconds in the hour divided by 3,600
-- column gpus_high: for planning: the forecast plus the largest error for this hour in past weeks
-- column items: expected number of texts or images
-- column week_ago_gpus: GPUs needed in the same hour of the previous week
-- column error_percent: forecast error (WAPE) over up to three past weeks, each forecast from the weeks before it: the sum of absolute errors divided by the sum of actual values; NULL if there is only one week
-- Method: the range is divided into weeks of 168 hours, counted back from its last whole hour. The forecast for an hour
-- is the median of the same hour in these weeks, times 1 + growth; it is never negative. The growth is the trend times
-- the number of weeks from the middle of these weeks to the coming week, divided by the mean of the medians. The trend
-- is the median slope between all pairs of weekly means (Theil 1950, Sen 1968,
-- https://doi.org/10.1080/01621459.1968.10480934). Weeks consist of UTC hours, so when clocks change, a week is off by
-- an hour.
WITH once AS (
  SELECT
    received_at,
    status,
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
    COALESCE(SUM(device_s), 0) / 3600 AS gpus
  FROM once
  GROUP BY moment
),
-- Week 1 is the last one, and slot 0 is the first hour of a week. Hours without requests are included.
grid AS (
  SELECT week, slot, TIMESTAMP_SUB(TIMESTAMP_TRUNC(@until, HOUR), INTERVAL (168 * week - slot) HOUR) AS moment
  FROM UNNEST(GENERATE_ARRAY(1, DIV(TIMESTAMP_DIFF(TIMESTAMP_TRUNC(@until, HOUR), @since, HOUR), 168))) AS week
  CROSS JOIN UNNEST(GENERATE_ARRAY(0, 167)) AS slot
),
past AS (
  SELECT
    grid.week AS week,
    grid.slot AS slot,
    CAST(COALESCE(used.items, 0) AS FLOAT64) AS items,
    COALESCE(used.gpus, 0.0) AS gpus
  FROM grid
  LEFT JOIN used USING (moment)
),
-- Cut 0 forecasts the coming week. The others forecast past weeks from the data before each of them.
seen AS (
  SELECT cut, week, slot, items, gpus
  FROM past
  CROSS JOIN UNNEST([0, 1, 2, 3]) AS cut
  WHERE week > cut
),
levels AS (
  SELECT cut, week, AVG(items) AS items, AVG(gpus) AS gpus
  FROM seen
  GROUP BY cut, week
),
slopes AS (
  SELECT DISTINCT
    newer.cut AS cut,
    PERCENTILE_CONT((newer.items - older.items) / (older.week - newer.week), 0.5) OVER (PARTITION BY newer.cut) AS items,
    PERCENTILE_CONT((newer.gpus - older.gpus) / (older.week - newer.week), 0.5) OVER (PARTITION BY newer.cut) AS gpus
  FROM levels AS newer
  JOIN levels AS older
    ON older.cut = newer.cut AND older.week > newer.week
),
medians AS (
  SELECT DISTINCT
    cut,
    slot,
    PERCENTILE_CONT(items, 0.5) OVER (PARTITION BY cut, slot) AS items,
    PERCENTILE_CONT(gpus, 0.5) OVER (PARTITION BY cut, slot) AS gpus
  FROM seen
),
bases AS (
  SELECT cut, AVG(items) AS items, AVG(gpus) AS gpus
  FROM medians
  GROUP BY cut
),
spans AS (
  SELECT cut, COUNT(*) AS weeks, AVG(week) - cut AS ahead
  FROM levels
  GROUP BY cut
),
forecasts AS (
  SELECT
    medians.cut AS cut,
    medians.slot AS slot,
    spans.weeks AS weeks,
    GREATEST(0, medians.items * (1 + COALESCE(SAFE_DIVIDE(spans.ahead * slopes.items, bases.items), 0))) AS items,
    GREATEST(0, medians.gpus * (1 + COALESCE(SAFE_DIVIDE(spans.ahead * slopes.gpus, bases.gpus), 0))) AS gpus
  FROM medians
  JOIN bases ON bases.cut = medians.cut
  JOIN spans ON spans.cut = medians.cut
  LEFT JOIN slopes ON slopes.cut = medians.cut
),
errors AS (
  SELECT past.slot AS slot, ABS(forecasts.gpus - past.gpus) AS error, past.gpus AS needed
  FROM forecasts
  JOIN past ON past.week = forecasts.cut AND past.slot = forecasts.slot
),
worst AS (
  SELECT slot, MAX(error) AS error
  FROM errors
  GROUP BY slot
),
total AS (SELECT SAFE_DIVIDE(SUM(error), SUM(needed)) AS error FROM errors)
SELECT
  TIMESTAMP_ADD(TIMESTAMP_TRUNC(@until, HOUR), INTERVAL forecasts.slot HOUR) AS hour,
  FORMAT_TIMESTAMP(
    '%Y-%m-%d %H:%M', TIMESTAMP_ADD(TIMESTAMP_TRUNC(@until, HOUR), INTERVAL forecasts.slot HOUR), @tz
  ) AS local_hour,
  forecasts.weeks AS weeks,
  ROUND(forecasts.gpus, 4) AS gpus,
  ROUND(forecasts.gpus + COALESCE(worst.error, 0), 4) AS gpus_high,
  ROUND(forecasts.items, 1) AS items,
  ROUND(past.gpus, 4) AS week_ago_gpus,
  ROUND(100 * total.error, 1) AS error_percent
FROM forecasts
CROSS JOIN total
JOIN past ON past.slot = forecasts.slot AND past.week = 1
LEFT JOIN worst ON worst.slot = forecasts.slot
WHERE forecasts.cut = 0
ORDER BY hour
