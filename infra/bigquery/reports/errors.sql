-- What failed, came too late or was refused, by model and error code, with the share of the model's items.
WITH once AS (
  SELECT *
  FROM `rows`
  WHERE received_at >= @since
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY attempt DESC, replied_at DESC) = 1
)
SELECT
  model,
  status,
  error_code,
  COUNT(*) AS items,
  COUNT(DISTINCT tenant) AS tenants,
  ROUND(100 * SAFE_DIVIDE(COUNT(*), ANY_VALUE(model_items)), 2) AS percent_of_model,
  MAX(attempt) AS most_attempts,
  MAX(received_at) AS latest,
  ANY_VALUE(request_id) AS example_request_id
FROM (SELECT *, COUNT(*) OVER (PARTITION BY model) AS model_items FROM once)
WHERE status != 'succeeded'
GROUP BY model, status, error_code
ORDER BY items DESC, model, error_code
