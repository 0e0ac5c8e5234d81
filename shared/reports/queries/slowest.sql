-- The 50 slowest items, with the time spent in each phase.
-- owner: operations
-- audience: operators
-- column row_id: ID of the row
-- column received_at: time at which the request was received
-- column tenant: the tenant
-- column model: model name in the catalog
-- column status: outcome of the item
-- column cache: source of the result
-- column total_ms: time from receiving the request to replying
-- column queue_ms: time at the broker
-- column batch_wait_ms: time in the worker until the item's batch started
-- column inference_ms: duration of the item's batch
-- column batch_size: items in the batch
-- column worker: worker that processed the item
-- column device: device that processed the item
-- column attempt: number of the final delivery attempt
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
