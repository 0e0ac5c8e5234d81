-- The 50 items that took longest, and where their time went.
-- owner: operations
-- audience: operators
-- column row_id: of the row
-- column received_at: when the request was received
-- column tenant: who asked
-- column model: its name in the catalog
-- column status: how the item ended
-- column cache: where the result came from
-- column total_ms: from receiving to replying
-- column queue_ms: at the broker
-- column batch_wait_ms: in the worker, until its batch began
-- column inference_ms: how long its batch ran
-- column batch_size: items in the batch
-- column worker: who computed it
-- column device: on what
-- column attempt: the delivery that ended it
WITH once AS (
  SELECT
    row_id,
    received_at,
    tenant,
    model,
    status,
    cache,
    total_ms,
    queue_ms,
    batch_wait_ms,
    inference_ms,
    batch_size,
    worker,
    device,
    attempt
  FROM `rows`
  WHERE received_at >= @since
    AND received_at < @until
    AND (ARRAY_LENGTH(@tenants) = 0 OR tenant IN UNNEST(@tenants))
    AND (ARRAY_LENGTH(@models) = 0 OR model IN UNNEST(@models))
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
)
SELECT
  row_id,
  received_at,
  tenant,
  model,
  status,
  cache,
  ROUND(total_ms, 1) AS total_ms,
  ROUND(queue_ms, 1) AS queue_ms,
  ROUND(batch_wait_ms, 1) AS batch_wait_ms,
  ROUND(inference_ms, 1) AS inference_ms,
  batch_size,
  worker,
  device,
  attempt
FROM once
WHERE total_ms IS NOT NULL
ORDER BY once.total_ms DESC, row_id
LIMIT 50
