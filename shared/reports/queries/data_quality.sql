-- Checks for duplicate, missing, and late rows, clocks that disagree, and charges that don't add up.
-- owner: operations
-- audience: operators
-- column check_name: name of the check
-- column found: number found
-- column total: number checked
-- column example: first row, request, or worker report found, by name
-- column means: explanation and remedy
WITH raw AS (
  SELECT
    row_id,
    request_id,
    item,
    tenant,
    status,
    received_at,
    replied_at,
    -- 5 ms: messages contain times as decimals, and clocks on one machine differ by less.
    COALESCE((
      TIMESTAMP_DIFF(received_at, published_at, MICROSECOND) > 5000
      OR TIMESTAMP_DIFF(published_at, pulled_at, MICROSECOND) > 5000
      OR TIMESTAMP_DIFF(pulled_at, started_at, MICROSECOND) > 5000
      OR TIMESTAMP_DIFF(started_at, finished_at, MICROSECOND) > 5000
      OR TIMESTAMP_DIFF(finished_at, replied_at, MICROSECOND) > 5000
    ), FALSE) AS is_skewed,
    status != 'succeeded' AND NOT (status IN ('canceled', 'expired') AND COALESCE(output_tokens, 0) > 0) AS is_undelivered,
    cost_usd,
    list_price_usd,
    charged_share,
    price_version
  FROM `rows`
  WHERE received_at >= @since
    AND received_at < @until
    AND (ARRAY_LENGTH(@tenants) = 0 OR tenant IN UNNEST(@tenants))
    AND (ARRAY_LENGTH(@models) = 0 OR model IN UNNEST(@models))
),
doubles AS (
  SELECT received_at, row_id, COUNT(*) - 1 AS extra
  FROM raw
  GROUP BY received_at, row_id
  HAVING COUNT(*) > 1
),
-- Item 0 is left out, so that the many requests with one item cost nothing here.
requests AS (
  SELECT received_at, request_id, COUNT(DISTINCT item) AS items, MAX(item) AS wanted
  FROM raw
  WHERE item > 0
  GROUP BY received_at, request_id
),
sums AS (
  SELECT
    COUNT(*) AS all_rows,
    COUNTIF(status != 'refused') AS all_items,
    COUNTIF(status != 'succeeded') AS undelivered_total,
    COUNT(list_price_usd) AS priced,
    COUNTIF(DATE(replied_at, @tz) > DATE(received_at, @tz)) AS late,
    MIN(IF(DATE(replied_at, @tz) > DATE(received_at, @tz), row_id, NULL)) AS late_example,
    COUNTIF(is_skewed) AS skewed,
    MIN(IF(is_skewed, row_id, NULL)) AS skewed_example,
    COUNTIF(received_at > CURRENT_TIMESTAMP()) AS early,
    MIN(IF(received_at > CURRENT_TIMESTAMP(), row_id, NULL)) AS early_example,
    COUNTIF(ABS(cost_usd - list_price_usd * charged_share) > 1e-9 * GREATEST(ABS(cost_usd), 1e-12)) AS wrong,
    MIN(IF(ABS(cost_usd - list_price_usd * charged_share) > 1e-9 * GREATEST(ABS(cost_usd), 1e-12), row_id, NULL)) AS wrong_example,
    COUNTIF(is_undelivered AND cost_usd > 0) AS undelivered,
    MIN(IF(is_undelivered AND cost_usd > 0, row_id, NULL)) AS undelivered_example,
    COUNTIF(status != 'refused' AND price_version IS NULL) AS unversioned,
    MIN(IF(status != 'refused' AND price_version IS NULL, row_id, NULL)) AS unversioned_example,
    COUNTIF(status != 'refused' AND tenant IS NULL) AS anonymous,
    MIN(IF(status != 'refused' AND tenant IS NULL, row_id, NULL)) AS anonymous_example
  FROM raw
),
workers AS (
  SELECT row_id, ABS(busy_s + idle_s + loading_s - TIMESTAMP_DIFF(reported_at, since, MICROSECOND) / 1000000) > 1 AS is_wrong
  FROM worker_hours
  WHERE hour >= TIMESTAMP_TRUNC(@since, HOUR)
    AND hour < @until
    AND since >= @since
    AND since < @until
  QUALIFY ROW_NUMBER() OVER (PARTITION BY hour, row_id ORDER BY reported_at DESC) = 1
),
checks AS (
  SELECT
    1 AS place,
    'double rows' AS check_name,
    COALESCE((SELECT SUM(extra) FROM doubles), 0) AS found,
    all_rows AS total,
    (SELECT MIN(row_id) FROM doubles) AS example,
    'Rows are written at least once. Reports count each once.' AS means
  FROM sums
  UNION ALL
  SELECT
    2,
    'missing items',
    COALESCE(SUM(wanted - items), 0),
    COALESCE(SUM(wanted), 0),
    MIN(IF(wanted > items, request_id, NULL)),
    'The request has an item after the missing one. Its row waits on a disk, or was lost: see the alert on lost rows.'
  FROM requests
  UNION ALL
  SELECT 3, 'late rows', late, all_rows, late_example, 'Replied on a later day than received, so a report of that day made at its end lacked them. Make it again.'
  FROM sums
  UNION ALL
  SELECT 4, 'clock skew', skewed, all_rows, skewed_example, 'A step ends before the step before it, by more than 5 ms: clocks of two machines disagree, and phases of time are wrong by that.'
  FROM sums
  UNION ALL
  SELECT 5, 'received in the future', early, all_rows, early_example, 'Received later than now: the clock of an API instance is wrong.'
  FROM sums
  UNION ALL
  SELECT 6, 'charges that do not add up', wrong, priced, wrong_example, 'The cost is not the list price times the charged share, to nine digits. An invoice would be wrong: stop it.'
  FROM sums
  UNION ALL
  SELECT 7, 'charged without delivery', undelivered, undelivered_total, undelivered_example, 'Failed and refused items cost nothing. Expired and canceled ones cost nothing but the tokens of a text that were read. An invoice would be wrong: stop it.'
  FROM sums
  UNION ALL
  SELECT 8, 'rows without a price version', unversioned, all_items, unversioned_example, 'Written by a release before the column. Invoices find the price from the cost.'
  FROM sums
  UNION ALL
  SELECT 9, 'rows without a tenant', anonymous, all_items, anonymous_example, 'Nobody can be charged for them.'
  FROM sums
  UNION ALL
  SELECT
    10,
    'times of workers that do not add up',
    COUNTIF(is_wrong),
    COUNT(*),
    MIN(IF(is_wrong, row_id, NULL)),
    'Busy, idle and loading are not the reported time, by more than a second. Costs of models are wrong by that.'
  FROM workers
)
SELECT
  check_name,
  found,
  total,
  example,
  means
FROM checks
ORDER BY place
