-- Usage and charges by hour.
-- column day: UTC day that contains the hour; filter on it in each query
-- column hour: start of the hour (UTC)
-- column tenant: the tenant
-- column key_id: public part of the API key; NULL if no key was required, and in rows from older releases
-- column plan: the tenant's plan
-- column model: model name in the catalog
-- column region: region in which the rows were written
-- column priority: interactive or batch
-- column requests: requests, including rejected ones; a request is counted in the row of its first item
-- column refused: rejected requests
-- column items: texts or images, excluding rejected requests
-- column succeeded: delivered items
-- column failed: items that failed
-- column expired: items that missed their deadline
-- column canceled: canceled items
-- column cached: delivered items that came from the cache or joined an identical item
-- column tokens: tokens of texts, charged or not
-- column input_tokens: input tokens of texts
-- column output_tokens: output tokens of texts
-- column cached_tokens: the part of input_tokens that was read from the cache
-- column pixel_steps: width x height x steps of images, charged or not
-- column device_s: whole-device seconds; a batch's time is divided equally among its items
-- column list_price_usd: list price of the work, before any share is applied
-- column cost_usd: amount charged, not rounded
SELECT
  DATE(received_at) AS day,
  TIMESTAMP_TRUNC(received_at, HOUR) AS hour,
  tenant,
  key_id,
  plan,
  model,
  region,
  priority,
  COUNTIF(item = 0) AS requests,
  COUNTIF(status = 'refused') AS refused,
  COUNTIF(status != 'refused') AS items,
  COUNTIF(status = 'succeeded') AS succeeded,
  COUNTIF(status = 'failed') AS failed,
  COUNTIF(status = 'expired') AS expired,
  COUNTIF(status = 'canceled') AS canceled,
  COUNTIF(status = 'succeeded' AND cache IN ('memory', 'redis', 'joined')) AS cached,
  COALESCE(SUM(tokens), 0) AS tokens,
  COALESCE(SUM(input_tokens), 0) AS input_tokens,
  COALESCE(SUM(output_tokens), 0) AS output_tokens,
  COALESCE(SUM(cached_tokens), 0) AS cached_tokens,
  COALESCE(SUM(pixel_steps), 0) AS pixel_steps,
  COALESCE(SUM(inference_ms / 1000 * device_share / batch_size), 0) AS device_s,
  COALESCE(SUM(list_price_usd), 0) AS list_price_usd,
  COALESCE(SUM(cost_usd), 0) AS cost_usd
FROM (
  SELECT *
  FROM `${project}.${dataset}.rows`
  WHERE ${only}
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
)
GROUP BY day, hour, tenant, key_id, plan, model, region, priority
