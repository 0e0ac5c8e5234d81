-- The amount charged in the rows of each budget, by calendar month (UTC), counted from year 0. It includes requests
-- answered before the budget's time in @end_times. A budget belongs to a tenant or to one of its keys.
-- @tenants has each tenant once, @budget_tenants has one tenant per budget.
-- The filter is directly on the table, as required for tables with a mandatory partition filter.
WITH once AS (
  SELECT tenant, key_id, received_at, COALESCE(replied_at, received_at) AS answered_at, cost_usd
  FROM `rows`
  WHERE received_at >= @since
    AND tenant IN UNNEST(@tenants)
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
),
budgets AS (
  SELECT place, budget_tenant, @keys[OFFSET(place)] AS budget_key, @end_times[OFFSET(place)] AS before
  FROM UNNEST(@budget_tenants) AS budget_tenant WITH OFFSET AS place
)
SELECT
  place,
  EXTRACT(YEAR FROM received_at) * 12 + EXTRACT(MONTH FROM received_at) - 1 AS month,
  SUM(cost_usd) AS usd
FROM budgets
JOIN once ON tenant = budget_tenant AND (budget_key = '' OR key_id = budget_key) AND answered_at < before
GROUP BY place, month
HAVING usd > 0
ORDER BY place, month
