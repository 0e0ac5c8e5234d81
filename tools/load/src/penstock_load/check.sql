-- The rows of one replay, each once, with the number of its copies.
-- Rows are written at least once. A report counts a copy that is not succeeded, else that of the last attempt. So does this.
SELECT
  client_request_id,
  request_id,
  row_id,
  item,
  tenant,
  model,
  key_id,
  status,
  error_code,
  tokens,
  pixel_steps,
  cost_usd,
  received_at,
  cache,
  COUNT(*) OVER (PARTITION BY received_at, row_id) AS copies,
  flow,
  step
FROM `rows`
WHERE received_at >= @since
  AND received_at < @until
  AND STARTS_WITH(client_request_id, @run)
QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
