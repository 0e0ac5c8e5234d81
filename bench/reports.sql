-- Rows of made-up traffic, for DuckDB: the same for the same $seed, in requests $first to $after of $requests.
-- Five weeks from $since. By hour of the day and weekday like an office, tenants by Zipf, three models, a third from the
-- cache, one item in a hundred written twice.
WITH
  curve AS (
    SELECT
      h AS hour,
      sum(weight) OVER (ORDER BY h) / sum(weight) OVER () AS upto
    FROM (
      SELECT h, (1.15 + sin((h % 24 - 8) / 24.0 * 2 * pi())) * CASE WHEN h // 24 % 7 >= 5 THEN 0.4 ELSE 1 END AS weight
      FROM range(840) AS hours (h)
    )
  ),
  tenant_shares AS (
    SELECT t, sum(1 / (t + 1.0)) OVER (ORDER BY t) / sum(1 / (t + 1.0)) OVER () AS upto
    FROM range(20) AS tenants (t)
  ),
  drawn AS (
    SELECT
      r,
      md5(concat($seed, '-', r)) AS request_id,
      (hash(concat('at', $seed, r)) % 1000003) / 1000003.0 AS u_at,
      (hash(concat('in', $seed, r)) % 3600000000)::BIGINT AS micros,
      (hash(concat('te', $seed, r)) % 1000003) / 1000003.0 AS u_tenant,
      hash(concat('mo', $seed, r)) % 10 AS model_draw,
      CASE WHEN hash(concat('k', $seed, r)) % 10 < 7 THEN 1 ELSE 4 END AS items
    FROM range($first, $after) AS requests (r)
  ),
  requests AS (
    SELECT
      drawn.*,
      $since::TIMESTAMPTZ + to_hours(curve.hour) + to_microseconds(micros) AS received_at,
      concat('tenant-', lpad(tenant_shares.t::VARCHAR, 2, '0')) AS tenant,
      CASE WHEN model_draw < 7 THEN 'embed-small' WHEN model_draw < 9 THEN 'embed-large' ELSE 'draw' END AS model
    FROM drawn
    ASOF JOIN curve ON drawn.u_at <= curve.upto
    ASOF JOIN tenant_shares ON drawn.u_tenant <= tenant_shares.upto
  ),
  items AS (
    SELECT
      requests.*,
      i AS item,
      hash(concat('x', $seed, r, '-', i)) AS x,
      (hash(concat('y', $seed, r, '-', i)) % 1000003) / 1000003.0 AS y
    FROM requests
    CROSS JOIN range(4) AS of_request (i)
    WHERE i < items
  ),
  ended AS (
    SELECT
      *,
      CASE
        WHEN x % 100 < 96 THEN 'succeeded'
        WHEN x % 100 < 98 THEN 'failed'
        WHEN x % 100 < 99 THEN 'expired'
        ELSE 'canceled'
      END AS status,
      CASE x // 100 % 6 WHEN 0 THEN 'memory' WHEN 1 THEN 'redis' ELSE 'miss' END AS cache,
      model = 'draw' AS is_image,
      CASE WHEN model = 'draw' THEN 5242880 ELSE (8 + y * 500)::BIGINT END AS units,
      CASE model WHEN 'embed-small' THEN 0.01 WHEN 'embed-large' THEN 0.05 ELSE 0.02 END
        * CASE WHEN received_at >= $since::TIMESTAMPTZ + to_days(17) THEN 1.25 ELSE 1 END AS price,
      CASE model WHEN 'embed-small' THEN 64 WHEN 'embed-large' THEN 32 ELSE 8 END AS capacity
    FROM items
  ),
  charged AS (
    SELECT
      *,
      cache = 'miss' AS is_computed,
      CASE WHEN status != 'succeeded' THEN 0.0 WHEN cache = 'miss' THEN 1.0 ELSE 0.2 END AS share,
      5 + y * 40 AS queue,
      1 + y * 10 AS wait,
      CASE WHEN is_image THEN 900 + y * 600 ELSE 10 + y * 40 END AS ran,
      (1 + x // 1000 % capacity)::BIGINT AS size
    FROM ended
  ),
  all_rows AS (
    SELECT
      concat(request_id, ':', item) AS row_id,
      request_id,
      item,
      tenant,
      model,
      '1' AS revision,
      CASE WHEN is_image THEN 'image' ELSE 'embedding' END AS task,
      CASE WHEN x % 3 = 0 THEN 'us-central1' ELSE 'europe-west4' END AS region,
      concat('api-', r % 8) AS api_instance,
      received_at,
      received_at + to_microseconds(1000) AS published_at,
      status,
      cache,
      CASE WHEN is_computed THEN concat(model, '-', x % 4) END AS worker,
      CASE WHEN is_computed THEN received_at + to_microseconds(((1 + queue) * 1000)::BIGINT) END AS pulled_at,
      CASE WHEN is_computed THEN received_at + to_microseconds(((1 + queue + wait) * 1000)::BIGINT) END AS started_at,
      CASE WHEN is_computed THEN received_at + to_microseconds(((1 + queue + wait + ran) * 1000)::BIGINT) END AS finished_at,
      received_at + to_microseconds(CASE WHEN is_computed THEN ((3 + queue + wait + ran) * 1000)::BIGINT ELSE 700 END)
        AS replied_at,
      CASE WHEN is_computed THEN queue END AS queue_ms,
      CASE WHEN is_computed THEN wait END AS batch_wait_ms,
      CASE WHEN is_computed THEN ran END AS inference_ms,
      CASE WHEN is_computed THEN 3 + queue + wait + ran ELSE 0.7 END AS total_ms,
      CASE WHEN is_computed THEN size END AS batch_size,
      CASE WHEN NOT is_image THEN units END AS tokens,
      CASE WHEN is_image THEN units END AS pixel_steps,
      CASE WHEN is_computed THEN 'cuda' END AS device,
      CASE WHEN is_computed THEN CASE WHEN is_image THEN 1.0 ELSE 0.25 END END AS device_share,
      CASE status WHEN 'failed' THEN 'model_failed' WHEN 'expired' THEN 'deadline_exceeded' WHEN 'canceled' THEN 'canceled' END
        AS error_code,
      1 AS attempt,
      units * price / 1e6 * share AS cost_usd,
      share AS charged_share,
      concat(tenant, '-key-', r % 3) AS key_id,
      'team' AS plan,
      CASE WHEN received_at >= $since::TIMESTAMPTZ + to_days(17) THEN '2' ELSE '1' END AS price_version,
      units * price / 1e6 AS list_price_usd,
      CASE WHEN NOT is_image THEN units END AS input_tokens,
      CASE WHEN is_computed THEN CASE WHEN is_image THEN 'a100' ELSE 'l4' END END AS gpu_type,
      CASE WHEN is_computed THEN x % 4 < 2 END AS spot,
      CASE WHEN r % 10 = 0 THEN 'batch' ELSE 'interactive' END AS priority,
      'openai-python' AS user_agent_family,
      CASE WHEN is_computed THEN x % 997 = 0 END AS cold_start,
      CASE WHEN is_computed THEN capacity END AS batch_capacity,
      CASE WHEN is_computed AND NOT is_image THEN units + (x % 60)::BIGINT END AS padded_tokens,
      CASE WHEN x % 101 = 0 THEN 2 ELSE 1 END AS copies
    FROM charged
  )
SELECT * EXCLUDE (copies, again)
FROM all_rows
CROSS JOIN range(2) AS writes (again)
WHERE again < copies
