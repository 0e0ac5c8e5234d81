-- The rows of the table daily_usage for one day. They take the place of that partition.
-- @day DATE; @since and @until TIMESTAMP, the ends of the day; @tz STRING, the billing zone.
WITH once AS (
  SELECT
    tenant,
    key_id,
    plan,
    model,
    price_version,
    item,
    status,
    cache,
    replied_at,
    tokens,
    input_tokens,
    output_tokens,
    cached_tokens,
    pixel_steps,
    list_price_usd,
    cost_usd,
    -- A batch's time belongs to its items in equal parts.
    inference_ms / 1000 * device_share / batch_size AS device_s,
    -- Rows from before the column: what was charged was charged in full.
    COALESCE(charged_share, IF(cost_usd > 0, 1.0, 0.0)) AS share
  FROM `rows`
  WHERE received_at >= @since
    AND received_at < @until
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
)
SELECT
  @day AS day,
  @tz AS tz,
  tenant,
  key_id,
  plan,
  model,
  price_version,
  COUNTIF(item = 0) AS requests,
  COUNTIF(status = 'refused') AS refused,
  COUNTIF(status != 'refused') AS items,
  COUNTIF(status = 'succeeded') AS succeeded,
  COUNTIF(status = 'failed') AS failed,
  COUNTIF(status = 'expired') AS expired,
  COUNTIF(status = 'canceled') AS canceled,
  COUNTIF(status = 'succeeded' AND cache IN ('memory', 'redis', 'joined')) AS cached,
  COALESCE(SUM(tokens), 0) AS tokens,
  COALESCE(SUM(tokens * share), 0) AS charged_tokens,
  COALESCE(SUM(input_tokens), 0) AS input_tokens,
  COALESCE(SUM(output_tokens), 0) AS output_tokens,
  COALESCE(SUM(cached_tokens), 0) AS cached_tokens,
  COALESCE(SUM(pixel_steps), 0) AS pixel_steps,
  COALESCE(SUM(pixel_steps * share), 0) AS charged_pixel_steps,
  COALESCE(SUM(device_s), 0) AS device_s,
  COALESCE(SUM(list_price_usd), 0) AS list_price_usd,
  COALESCE(SUM(cost_usd), 0) AS cost_usd,
  COUNTIF(replied_at >= @until) AS late_rows,
  CURRENT_TIMESTAMP() AS made_at
FROM once
GROUP BY tenant, key_id, plan, model, price_version
ORDER BY tenant, model, key_id, plan, price_version
