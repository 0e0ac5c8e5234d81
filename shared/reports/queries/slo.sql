-- Daily availability and deadline results compared with their objectives, and the burn rates of their error budgets.
-- owner: operations
-- audience: operators
-- @availability FLOAT64 = 0.999: the share of requests that must not fail
-- @deadlines FLOAT64 = 0.99: the share of items that must be on time
-- plot: lines availability_percent by day, one color per scope
-- plot: lines deadlines_burn by day, one color per scope
-- column day: day in the report's time zone
-- column scope: a model, or (all); only (all) has rows for days without requests
-- column requests: requests that count toward availability: those in which all items succeeded, or one failed with a 5xx other than 504
-- column bad_requests: requests that failed with a 5xx other than 504
-- column availability_percent: percentage of counted requests that were good
-- column availability_burn: burn rate of the error budget; at a rate of 1, the budget lasts exactly until the end of the period
-- column availability_budget_left_percent: percentage of the error budget left, based on the days from the start of the range through this one
-- column items: items that count toward deadlines: interactive items that were delivered, late, or rejected for lack of capacity
-- column bad_items: items that were late, or rejected for lack of capacity (a rejected request counts as one)
-- column deadlines_percent: percentage of counted items that were on time
-- column deadlines_burn: burn rate of the error budget
-- column deadlines_budget_left_percent: percentage of the error budget left, based on the days from the start of the range through this one
-- Decision 49 has the definitions. Rows do not record whether a caller set a custom deadline, so all interactive items
-- count here. Metrics exclude items with shortened deadlines.
WITH once AS (
  SELECT
    model,
    received_at,
    request_id,
    item,
    status,
    error_code,
    COALESCE(priority, 'interactive') AS priority
  FROM `rows`
  WHERE received_at >= @since
    AND received_at < @until
    AND (ARRAY_LENGTH(@tenants) = 0 OR tenant IN UNNEST(@tenants))
    AND (ARRAY_LENGTH(@models) = 0 OR model IN UNNEST(@models))
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
),
by_model AS (
  SELECT
    DATE(received_at, @tz) AS day,
    model AS scope,
    COUNTIF(item = 0) AS all_requests,
    COUNT(DISTINCT IF(status = 'succeeded', NULL, request_id)) AS not_delivered,
    COUNT(DISTINCT IF(
      status IN ('failed', 'refused') AND COALESCE(error_code, 'internal') IN ('model_failed', 'internal', 'unavailable'),
      request_id,
      NULL
    )) AS bad_requests,
    COUNTIF(priority = 'interactive' AND status = 'succeeded') AS in_time,
    COUNTIF(
      priority = 'interactive' AND (status = 'expired' OR (status = 'refused' AND error_code = 'overloaded'))
    ) AS bad_items
  FROM once
  GROUP BY day, scope
),
days AS (
  SELECT day, scope, all_requests - not_delivered + bad_requests AS requests, bad_requests, in_time + bad_items AS items, bad_items
  FROM by_model
  WHERE scope != ''
  UNION ALL
  SELECT
    day,
    '(all)',
    COALESCE(SUM(all_requests - not_delivered + bad_requests), 0),
    COALESCE(SUM(bad_requests), 0),
    COALESCE(SUM(in_time + bad_items), 0),
    COALESCE(SUM(bad_items), 0)
  FROM UNNEST(GENERATE_DATE_ARRAY(DATE(@since, @tz), DATE(TIMESTAMP_SUB(@until, INTERVAL 1 MICROSECOND), @tz))) AS day
  LEFT JOIN by_model USING (day)
  GROUP BY day
),
so_far AS (
  SELECT
    day,
    scope,
    requests,
    bad_requests,
    items,
    bad_items,
    SUM(requests) OVER up_to_day AS requests_so_far,
    SUM(bad_requests) OVER up_to_day AS bad_requests_so_far,
    SUM(items) OVER up_to_day AS items_so_far,
    SUM(bad_items) OVER up_to_day AS bad_items_so_far
  FROM days
  WINDOW up_to_day AS (PARTITION BY scope ORDER BY day ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
)
SELECT
  day,
  scope,
  requests,
  bad_requests,
  ROUND(100 * (1 - SAFE_DIVIDE(bad_requests, requests)), 4) AS availability_percent,
  ROUND(SAFE_DIVIDE(SAFE_DIVIDE(bad_requests, requests), 1 - @availability), 3) AS availability_burn,
  ROUND(100 * (1 - SAFE_DIVIDE(SAFE_DIVIDE(bad_requests_so_far, requests_so_far), 1 - @availability)), 2)
    AS availability_budget_left_percent,
  items,
  bad_items,
  ROUND(100 * (1 - SAFE_DIVIDE(bad_items, items)), 4) AS deadlines_percent,
  ROUND(SAFE_DIVIDE(SAFE_DIVIDE(bad_items, items), 1 - @deadlines), 3) AS deadlines_burn,
  ROUND(100 * (1 - SAFE_DIVIDE(SAFE_DIVIDE(bad_items_so_far, items_so_far), 1 - @deadlines)), 2)
    AS deadlines_budget_left_percent
FROM so_far
ORDER BY day DESC, scope
