-- A tenant's own rows, each once, without what tells of workers and of others in the same batch.
-- column row_id: identifies the row
-- column request_id: one id from HTTP to reply
-- column client_request_id: the caller's x-request-id
-- column item: the item's index in the request, from 0
-- column batch_id: the batch that the item is a line of
-- column flow: the flow that asked for the item
-- column step: the id of the flow's step
-- column key_id: the public part of the API key
-- column plan: the tenant's plan when the request came
-- column model: its name in the catalog
-- column revision: the model's revision
-- column received_at: when the API received the request; have a filter on it in each query
-- column replied_at: when the answer was given
-- column status: succeeded, failed, expired, canceled or refused
-- column error_code: why the item has no result
-- column cache: miss, memory, redis, joined or none
-- column priority: interactive or batch
-- column queue_ms: from publishing to pulling
-- column batch_wait_ms: from pulling to the start of the batch
-- column inference_ms: how long the item's batch ran
-- column total_ms: from receiving to replying
-- column tokens: of a text
-- column input_tokens: tokens that were read
-- column output_tokens: tokens that were written
-- column cached_tokens: the part of input_tokens that was not computed again
-- column pixel_steps: width x height x steps of an image
-- column adapter: the adapter that an image was drawn with
-- column work: what an item of a custom model weighs
-- column price_version: which price of the catalog
-- column list_price_usd: what the work costs before any share
-- column charged_share: the part of the price that is charged
-- column cost_usd: what was charged
-- column user_agent_family: the kind of client
SELECT
  row_id,
  request_id,
  client_request_id,
  item,
  batch_id,
  flow,
  step,
  key_id,
  plan,
  model,
  revision,
  received_at,
  replied_at,
  status,
  error_code,
  cache,
  priority,
  queue_ms,
  batch_wait_ms,
  inference_ms,
  total_ms,
  tokens,
  input_tokens,
  output_tokens,
  cached_tokens,
  pixel_steps,
  adapter,
  work,
  price_version,
  list_price_usd,
  charged_share,
  cost_usd,
  user_agent_family
FROM `${project}.${dataset}.rows`
WHERE ${only}
QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
