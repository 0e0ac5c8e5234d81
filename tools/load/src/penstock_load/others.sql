-- What other callers of the same tenants used in the same hours, as the report usage_hours counts it.
WITH once AS (
  SELECT
    client_request_id,
    received_at,
    tenant,
    model,
    item,
    status,
    tokens,
    pixel_steps,
    cost_usd
  FROM `rows`
  WHERE received_at >= @since
    AND received_at < @until
    AND tenant IN UNNEST(@tenants)
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
)
SELECT
  TIMESTAMP_TRUNC(received_at, HOUR) AS hour,
  tenant,
  model,
  COUNTIF(item = 0) AS requests,
  COUNTIF(status = 'refused') AS refused,
  COUNTIF(status != 'refused') AS items,
  COUNTIF(status = 'succeeded') AS succeeded,
  IFNULL(SUM(tokens), 0) AS tokens,
  IFNULL(SUM(pixel_steps), 0) AS pixel_steps,
  IFNULL(SUM(cost_usd), 0) AS cost_usd
FROM once
WHERE client_request_id IS NULL
  OR NOT STARTS_WITH(client_request_id, @run)
GROUP BY hour, tenant, model
