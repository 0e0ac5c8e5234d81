-- What the summary of a day says of each tenant and model, from daily_usage.
-- @day DATE.
SELECT
  COALESCE(tenant, '') AS tenant,
  model,
  SUM(IF(day = @day, requests, 0)) AS requests,
  SUM(IF(day = @day, refused, 0)) AS refused,
  SUM(IF(day = @day, items, 0)) AS items,
  SUM(IF(day = @day, failed + expired, 0)) AS errors,
  SUM(IF(day = @day, late_rows, 0)) AS late_rows,
  SUM(IF(day = @day, device_s, 0)) AS device_s,
  SUM(IF(day = @day, cost_usd, 0)) AS cost_usd,
  SUM(IF(day = DATE_SUB(@day, INTERVAL 7 DAY), cost_usd, 0)) AS week_ago_usd,
  SUM(IF(day >= DATE_TRUNC(@day, MONTH), cost_usd, 0)) AS month_usd
FROM daily_usage
WHERE day >= LEAST(DATE_TRUNC(@day, MONTH), DATE_SUB(@day, INTERVAL 7 DAY))
  AND day <= @day
GROUP BY tenant, model
ORDER BY cost_usd DESC, tenant, model
