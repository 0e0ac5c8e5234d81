-- The rows of the table anomalies for one day: hours outside the usual band of that hour of the week.
-- @day DATE; @until TIMESTAMP, the end of the last hour that is judged; @tz STRING, the billing zone; @least_weeks INT64;
-- @least_usd and @least_errors FLOAT64, the least half width of a band; @least_share FLOAT64, the same as a share of the
-- median.
--
-- An hour is unusual if its modified z-score 0.6745 x (value - median) / MAD is beyond 3.5 (Iglewicz and Hoaglin 1993, in the
-- NIST handbook: https://www.itl.nist.gov/div898/handbook/eda/section3/eda35h.htm). Median and MAD, the median of the absolute
-- deviations from it, are those of the same hour on the same weekday of the six weeks before. So the half width of the band
-- is 3.5 / 0.6745 x MAD, and never less than the limits above: the MAD of few or equal values is too small.
WITH once AS (
  SELECT tenant, received_at, status, cost_usd
  FROM `rows`
  WHERE received_at >= TIMESTAMP(DATE_SUB(@day, INTERVAL 42 DAY), @tz)
    AND received_at < @until
    -- Each range is named, so that only partitions of this weekday are read.
    AND (
      received_at >= TIMESTAMP(@day, @tz)
      OR (
        received_at >= TIMESTAMP(DATE_SUB(@day, INTERVAL 7 DAY), @tz)
        AND received_at < TIMESTAMP(DATE_SUB(@day, INTERVAL 6 DAY), @tz)
      )
      OR (
        received_at >= TIMESTAMP(DATE_SUB(@day, INTERVAL 14 DAY), @tz)
        AND received_at < TIMESTAMP(DATE_SUB(@day, INTERVAL 13 DAY), @tz)
      )
      OR (
        received_at >= TIMESTAMP(DATE_SUB(@day, INTERVAL 21 DAY), @tz)
        AND received_at < TIMESTAMP(DATE_SUB(@day, INTERVAL 20 DAY), @tz)
      )
      OR (
        received_at >= TIMESTAMP(DATE_SUB(@day, INTERVAL 28 DAY), @tz)
        AND received_at < TIMESTAMP(DATE_SUB(@day, INTERVAL 27 DAY), @tz)
      )
      OR (
        received_at >= TIMESTAMP(DATE_SUB(@day, INTERVAL 35 DAY), @tz)
        AND received_at < TIMESTAMP(DATE_SUB(@day, INTERVAL 34 DAY), @tz)
      )
      OR (
        received_at >= TIMESTAMP(DATE_SUB(@day, INTERVAL 42 DAY), @tz)
        AND received_at < TIMESTAMP(DATE_SUB(@day, INTERVAL 41 DAY), @tz)
      )
    )
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
),
midnights AS (
  SELECT tenant, received_at, status, cost_usd, TIMESTAMP(DATE(received_at, @tz), @tz) AS midnight
  FROM once
),
-- Hours count from midnight on clocks of the zone, some of which are off by half an hour.
placed AS (
  SELECT
    tenant,
    TIMESTAMP_ADD(midnight, INTERVAL DIV(TIMESTAMP_DIFF(received_at, midnight, SECOND), 3600) HOUR) AS hour,
    cost_usd,
    status IN ('failed', 'expired') AS is_error
  FROM midnights
),
used AS (
  SELECT 'all' AS scope, CAST(NULL AS STRING) AS tenant, hour, SUM(cost_usd) AS cost_usd, COUNTIF(is_error) AS errors
  FROM placed
  GROUP BY hour
  UNION ALL
  SELECT 'tenant' AS scope, tenant, hour, SUM(cost_usd) AS cost_usd, COUNTIF(is_error) AS errors
  FROM placed
  WHERE tenant IS NOT NULL
  GROUP BY tenant, hour
),
-- A new tenant has no past yet: weeks without any row of that day, before the first with one, are not zeros.
scopes AS (
  SELECT scope, tenant, MIN(hour) AS first_hour
  FROM used
  GROUP BY scope, tenant
),
weekdays AS (
  SELECT
    week,
    TIMESTAMP(DATE_SUB(@day, INTERVAL (7 * week) DAY), @tz) AS midnight,
    TIMESTAMP(DATE_SUB(@day, INTERVAL (7 * week - 1) DAY), @tz) AS day_end
  FROM UNNEST(GENERATE_ARRAY(0, 6)) AS week
),
hours AS (
  SELECT week, hour, EXTRACT(HOUR FROM hour AT TIME ZONE @tz) AS slot, day_end
  FROM weekdays
  CROSS JOIN UNNEST(
    GENERATE_TIMESTAMP_ARRAY(midnight, TIMESTAMP_SUB(LEAST(day_end, @until), INTERVAL 1 MICROSECOND), INTERVAL 1 HOUR)
  ) AS hour
),
figures AS (
  SELECT
    scopes.scope AS scope,
    scopes.tenant AS tenant,
    hours.week AS week,
    hours.slot AS slot,
    hours.hour AS hour,
    COALESCE(used.cost_usd, 0.0) AS cost_usd,
    CAST(COALESCE(used.errors, 0) AS FLOAT64) AS errors
  FROM scopes
  CROSS JOIN hours
  LEFT JOIN used
    ON used.scope = scopes.scope AND COALESCE(used.tenant, '') = COALESCE(scopes.tenant, '') AND used.hour = hours.hour
  WHERE hours.day_end > scopes.first_hour
),
series AS (
  SELECT scope, tenant, week, slot, hour, 'cost_usd' AS measure, cost_usd AS value, @least_usd AS least
  FROM figures
  UNION ALL
  SELECT scope, tenant, week, slot, hour, 'errors' AS measure, errors AS value, @least_errors AS least
  FROM figures
),
middles AS (
  SELECT
    scope,
    tenant,
    slot,
    measure,
    value,
    PERCENTILE_CONT(value, 0.5) OVER (PARTITION BY scope, tenant, measure, slot) AS median
  FROM series
  WHERE week > 0
),
deviations AS (
  SELECT
    scope,
    tenant,
    slot,
    measure,
    median,
    PERCENTILE_CONT(ABS(value - median), 0.5) OVER (PARTITION BY scope, tenant, measure, slot) AS mad
  FROM middles
),
usual AS (
  SELECT scope, tenant, slot, measure, ANY_VALUE(median) AS median, ANY_VALUE(mad) AS mad, COUNT(*) AS weeks
  FROM deviations
  GROUP BY scope, tenant, slot, measure
  HAVING weeks >= @least_weeks
),
judged AS (
  SELECT
    series.hour AS hour,
    series.scope AS scope,
    series.tenant AS tenant,
    series.measure AS measure,
    series.value AS value,
    usual.median AS median,
    usual.mad AS mad,
    usual.weeks AS weeks,
    GREATEST(3.5 / 0.6745 * usual.mad, @least_share * usual.median, series.least) AS half_width
  FROM series
  JOIN usual
    ON usual.scope = series.scope
    AND COALESCE(usual.tenant, '') = COALESCE(series.tenant, '')
    AND usual.measure = series.measure
    AND usual.slot = series.slot
  WHERE series.week = 0
)
SELECT
  @day AS day,
  @tz AS tz,
  hour,
  scope,
  tenant,
  measure,
  IF(value > median, 'high', 'low') AS direction,
  value,
  median,
  mad,
  GREATEST(median - half_width, 0) AS low,
  median + half_width AS high,
  ROUND(SAFE_DIVIDE(0.6745 * (value - median), mad), 2) AS score,
  weeks,
  CURRENT_TIMESTAMP() AS made_at
FROM judged
WHERE value > median + half_width
  -- Fewer errors than usual are not a reason to wake anybody.
  OR (measure = 'cost_usd' AND value < median - half_width)
ORDER BY hour, scope, tenant, measure
