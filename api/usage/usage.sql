-- Usage in buckets of @width seconds. The `usage` report sums the same rows (infra/bigquery).
-- The filter is directly on the table, as required for tables with a mandatory partition filter.
WITH once AS (
  SELECT
    *,
    -- Rows without the column: the full price was charged.
    COALESCE(charged_share, IF(cost_usd > 0, 1.0, 0.0)) AS share
  FROM `rows`
  WHERE received_at >= @since
    AND received_at < @until
    AND (@all_tenants OR tenant IN UNNEST(@tenants))
    AND (@all_models OR model IN UNNEST(@models))
    AND (@all_keys OR key_id IN UNNEST(@keys))
    AND (@all_tasks OR task IN UNNEST(@tasks))
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
)
SELECT
  DIV(UNIX_SECONDS(received_at) - @start, @width) AS bucket,
  IF(@by_tenant, tenant, NULL) AS of_tenant,
  IF(@by_model, model, NULL) AS of_model,
  IF(@by_key, key_id, NULL) AS of_key,
  -- A flow run is a request to each of its models.
  COUNT(DISTINCT IF(status = 'refused', NULL, request_id)) AS model_requests,
  COUNTIF(item = 0) AS requests,
  COUNTIF(status = 'refused') AS refused,
  COUNTIF(status != 'refused') AS items,
  COUNTIF(status = 'succeeded') AS succeeded,
  COUNTIF(status = 'succeeded' AND cache IN ('memory', 'redis', 'joined')) AS cached,
  COALESCE(SUM(IF(status = 'succeeded', tokens, 0)), 0) AS tokens,
  COALESCE(SUM(tokens * share), 0) AS charged_tokens,
  COALESCE(SUM(IF(status = 'succeeded', pixel_steps, 0)), 0) AS pixel_steps,
  COALESCE(SUM(pixel_steps * share), 0) AS charged_pixel_steps,
  -- A batch's time is divided equally among its items.
  COALESCE(SUM(inference_ms / 1000 * device_share / batch_size), 0) AS device_s,
  COALESCE(SUM(cost_usd), 0) AS cost_usd
FROM once
GROUP BY bucket, of_tenant, of_model, of_key
ORDER BY bucket, of_tenant, of_model, of_key
LIMIT @most
