-- Failed, late, and rejected items, by model and error code.
-- owner: operations
-- audience: tenants
-- plot: bars items by error_code, one color per model
-- totals: items
-- column model: model name in the catalog
-- column status: failed, expired, canceled, or refused
-- column error_code: the reason
-- column items: number of items or rejected requests
-- column tenants: number of affected tenants
-- column percent_of_model: percentage of the model's items and rejected requests
-- column most_attempts: maximum number of deliveries per item
-- column latest: time at which the most recent affected item or request was received
-- column example_request_id: request ID of the most recent affected item or request, for searching the logs
WITH once AS (
  SELECT
    model,
    tenant,
    status,
    error_code,
    attempt,
    received_at,
    request_id
  FROM `rows`
  WHERE received_at >= @since
    AND received_at < @until
    AND (ARRAY_LENGTH(@tenants) = 0 OR tenant IN UNNEST(@tenants))
    AND (ARRAY_LENGTH(@models) = 0 OR model IN UNNEST(@models))
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
),
models AS (SELECT model, COUNT(*) AS model_items FROM once GROUP BY model)
SELECT
  model,
  status,
  error_code,
  COUNT(*) AS items,
  COUNT(DISTINCT tenant) AS tenants,
  ROUND(100 * SAFE_DIVIDE(COUNT(*), ANY_VALUE(model_items)), 2) AS percent_of_model,
  COALESCE(MAX(attempt), 0) AS most_attempts,
  MAX(received_at) AS latest,
  ARRAY_AGG(request_id ORDER BY received_at DESC, request_id LIMIT 1)[OFFSET(0)] AS example_request_id
FROM once
JOIN models USING (model)
WHERE status != 'succeeded'
GROUP BY model, status, error_code
ORDER BY items DESC, model, error_code
