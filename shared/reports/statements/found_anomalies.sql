-- The anomalies of a day, as the table has them.
-- @day DATE.
SELECT hour, scope, tenant, measure, direction, value, median, low, high, score, weeks
FROM anomalies
WHERE day = @day
ORDER BY hour, scope, tenant, measure
