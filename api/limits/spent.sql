-- What each key of some tenants was charged, by calendar month (UTC), counted from year 0: for all
-- requests, and for those from before @settled.
-- The filter is directly on the table, as required for tables with a mandatory partition filter.
WITH once AS (
  SELECT tenant, key_id, received_at, cost_usd
  FROM `rows`
  WHERE received_at >= @since
    AND tenant IN UNNEST(@tenants)
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
)
SELECT
  tenant,
  key_id,
  EXTRACT(YEAR FROM received_at) * 12 + EXTRACT(MONTH FROM received_at) - 1 AS month,
  SUM(cost_usd) AS usd,
  SUM(IF(received_at < @settled, cost_usd, 0)) AS settled_usd
FROM once
GROUP BY tenant, key_id, month
HAVING usd > 0
ORDER BY tenant, key_id, month
LIMIT @most
