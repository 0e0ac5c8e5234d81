SELECT
  concat(m, '-', n, ':', h) AS row_id,
  concat(m, '-', n) AS worker,
  $since::TIMESTAMPTZ + to_hours(h) AS hour,
  hour AS since,
  hour + to_seconds(3599) AS reported_at,
  $since::TIMESTAMPTZ AS started_at,
  'europe-west4' AS region,
  m AS deployment,
  m AS models,
  CASE WHEN m = 'draw' THEN 'a100' ELSE 'l4' END AS gpu_type,
  n < 2 AS spot,
  CASE WHEN m = 'draw' THEN 1.0 ELSE 0.25 END AS device_share,
  1200.0 AS busy_s,
  2389.0 AS idle_s,
  10.0 AS loading_s,
  100 AS batches,
  900 AS items,
  0 AS cold_starts
FROM range(840) AS hours (h)
CROSS JOIN range(4) AS workers (n)
CROSS JOIN (VALUES ('embed-small'), ('embed-large'), ('draw')) AS models (m)
