-- Percentage of each tenant's monthly budget (UTC) that has been spent, with a forecast.
-- owner: finance
-- audience: tenants
-- without: models, tz
-- days: 1
-- range: months
-- @budget_tenants ARRAY<STRING>: tenants with a budget in the key directory
-- @budgets_usd ARRAY<FLOAT64>: their budgets, in the same order
-- plot: bars spent_usd, budget_usd by tenant
-- totals: spent_usd, refused
-- column tenant: the tenant
-- column month: first day of the month in UTC, regardless of the time zone
-- column spent_usd: amount charged so far this month, not rounded
-- column budget_usd: current budget; NULL if the tenant does not have one
-- column percent: percentage of the budget that has been spent
-- column left_usd: remaining budget; negative if exceeded
-- column elapsed_percent: percentage of the month that has passed
-- column month_end_usd: projected amount for the month at the current pace
-- column refused: requests rejected because the budget was spent
-- The API also counts requests in flight, so it may start rejecting requests slightly before this report shows 100 percent.
WITH once AS (
  SELECT
    tenant,
    received_at,
    error_code,
    cost_usd
  FROM `rows`
  WHERE received_at >= @since
    AND received_at < @until
    AND (ARRAY_LENGTH(@tenants) = 0 OR tenant IN UNNEST(@tenants))
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
),
budgets AS (
  SELECT tenant, @budgets_usd[OFFSET(place)] AS budget_usd
  FROM UNNEST(@budget_tenants) AS tenant WITH OFFSET AS place
  WHERE ARRAY_LENGTH(@tenants) = 0 OR tenant IN UNNEST(@tenants)
),
months AS (
  SELECT
    month,
    TIMESTAMP_DIFF(
      LEAST(@until, TIMESTAMP(DATE_ADD(month, INTERVAL 1 MONTH))), GREATEST(@since, TIMESTAMP(month)), SECOND
    ) / TIMESTAMP_DIFF(TIMESTAMP(DATE_ADD(month, INTERVAL 1 MONTH)), TIMESTAMP(month), SECOND) AS elapsed
  FROM UNNEST(GENERATE_DATE_ARRAY(
    DATE_TRUNC(DATE(@since), MONTH), DATE(TIMESTAMP_SUB(@until, INTERVAL 1 MICROSECOND)), INTERVAL 1 MONTH
  )) AS month
),
spent AS (
  SELECT
    tenant,
    DATE_TRUNC(DATE(received_at), MONTH) AS month,
    SUM(cost_usd) AS spent_usd,
    COUNTIF(error_code = 'insufficient_quota') AS refused
  FROM once
  WHERE tenant IS NOT NULL
  GROUP BY tenant, month
),
-- A tenant with a budget has a line in each month. Other tenants have lines for months with charges.
wanted AS (
  SELECT tenant, month FROM budgets CROSS JOIN months
  UNION DISTINCT
  SELECT tenant, month FROM spent
)
SELECT
  tenant,
  month,
  COALESCE(spent_usd, 0) AS spent_usd,
  budget_usd,
  ROUND(100 * SAFE_DIVIDE(COALESCE(spent_usd, 0), budget_usd), 2) AS percent,
  budget_usd - COALESCE(spent_usd, 0) AS left_usd,
  ROUND(100 * elapsed, 1) AS elapsed_percent,
  SAFE_DIVIDE(COALESCE(spent_usd, 0), elapsed) AS month_end_usd,
  COALESCE(refused, 0) AS refused
FROM wanted
JOIN months USING (month)
LEFT JOIN spent USING (tenant, month)
LEFT JOIN budgets USING (tenant)
ORDER BY month DESC, percent DESC, spent_usd DESC, tenant
