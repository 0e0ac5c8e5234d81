-- A tenant's own rows, without duplicates and without data about workers and other tenants.
-- column row_id: Identifies the row: <request_id>:<item>, or <request_id>:refused. The same item written twice has the same row_id.
-- column request_id: The request's ID, the same from HTTP to reply.
-- column item: The item's index in the request, from 0.
-- column model: The model's name in the catalog; empty if a request was rejected before it named one.
-- column revision: The model's revision in the catalog.
-- column received_at: When the API received the request; the row's partition. Filter by it in each query.
-- column replied_at: When the reply was published or the response sent.
-- column queue_ms: Time from publishing to pulling.
-- column batch_wait_ms: Time from pulling to the start of the batch.
-- column inference_ms: How long the item's batch ran.
-- column total_ms: Time from receiving the request to replying.
-- column cache: Origin of the result: miss, memory, redis, joined, or none.
-- column tokens: Tokens of a text, including special tokens; tokens times charged_share are charged.
-- column pixel_steps: Width x height x steps of an image; pixel_steps times charged_share are charged.
-- column status: succeeded, failed, expired, or canceled; refused: the only row of a request that was rejected as a whole.
-- column error_code: Why the item has no result, or why the request was rejected.
-- column cost_usd: Charge for the item: its price times charged_share.
-- column client_request_id: The caller's x-request-id; sha256:<32 hex digits> if it is longer than 128 characters or contains characters other than letters, digits, dots, underscores, colons, and hyphens.
-- column charged_share: The share of the price that is charged: 1 if the item was computed and delivered, the catalog's price.cached_share if another item's result was delivered, 0 if nothing was delivered; times the share of the list price that the request pays.
-- column key_id: The public part of the request's API key; null if keys were not required.
-- column plan: The tenant's plan when the request arrived; null if there was none.
-- column price_version: The version of the price in the catalog, or a digest of its figures.
-- column list_price_usd: The price of the item's work before any share: cost_usd is this times charged_share.
-- column input_tokens: Tokens read; for an embedding, all tokens.
-- column output_tokens: Tokens generated; null for models that don't generate text.
-- column cached_tokens: The part of input_tokens that was not computed again because an earlier input had the same beginning; null for models without such a cache.
-- column priority: The item's priority: interactive or batch.
-- column user_agent_family: The kind of client, from a fixed set: openai-python, curl, browser, other, and so on; null if unknown.
-- column batch_id: The batch that contains the item; null for other items.
-- column work: The item's work, as returned by a custom model's class; work times charged_share are charged; null for other models.
-- column flow: The flow that requested the item; null if a caller requested it.
-- column step: The ID of the flow's step; null if flow is null.
-- column adapter: The image's adapter (lora_weights); null without an adapter, and for items without a result.
-- column work_unit: The unit of work if the price depends on it: seconds, characters, or pages; null for other items, and in rows written by older releases.
SELECT
  row_id,
  request_id,
  item,
  model,
  revision,
  received_at,
  replied_at,
  queue_ms,
  batch_wait_ms,
  inference_ms,
  total_ms,
  cache,
  tokens,
  pixel_steps,
  status,
  error_code,
  cost_usd,
  client_request_id,
  charged_share,
  key_id,
  plan,
  price_version,
  list_price_usd,
  input_tokens,
  output_tokens,
  cached_tokens,
  priority,
  user_agent_family,
  batch_id,
  work,
  flow,
  step,
  adapter,
  work_unit
FROM `${project}.${dataset}.rows`
WHERE ${only}
QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
