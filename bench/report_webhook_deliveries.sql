SELECT
  concat('d', i, ':', k) AS row_id,
  concat('d', i) AS delivery_id,
  concat('tenant-', lpad((i % 20)::VARCHAR, 2, '0')) AS tenant,
  'draw' AS model,
  CASE WHEN i % 2 = 0 THEN 'start' ELSE 'completed' END AS event,
  k + 1 AS attempt,
  CASE WHEN k = 1 OR i % 50 > 0 THEN 'delivered' ELSE 'failed' END AS outcome,
  CASE WHEN k = 1 OR i % 50 > 0 THEN 200 ELSE 503 END AS status_code,
  20.0 + i % 300 AS duration_ms,
  $since::TIMESTAMPTZ + to_seconds(i * 60) AS published_at,
  published_at + to_milliseconds(200 + i % 900) + to_seconds(30 * k) AS delivered_at
FROM range(50000) AS events (i)
CROSS JOIN range(2) AS attempts (k)
WHERE k = 0 OR i % 50 = 0
