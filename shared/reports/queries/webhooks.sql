-- Webhook deliveries, failures, and delays, by tenant and event.
-- owner: product
-- audience: tenants
-- without: tz
-- plot: bars delivered_percent by tenant, one color per event
-- totals: events, attempts, given_up, open
-- column tenant: tenant that owns the webhook
-- column event: kind of event
-- column events: events
-- column attempts: delivery attempts
-- column delivered_percent: percentage of events that arrived
-- column first_try_percent: percentage of events that arrived on the first attempt in the range
-- column given_up: events that were refused, gone, or forbidden, and will not be retried
-- column open: failed events that may be retried
-- column duration_p95_ms: 95th percentile of an attempt's duration
-- column delay_p50_s: median time from the event to its arrival
-- column delay_p95_s: its 95th percentile
-- column top_failure: most frequent status code or error of failed attempts
WITH once AS (
  SELECT
    row_id,
    COALESCE(tenant, '') AS tenant,
    event,
    delivery_id,
    outcome,
    COALESCE(CAST(status_code AS STRING), error, 'unknown') AS answer,
    duration_ms,
    delivered_at,
    TIMESTAMP_DIFF(delivered_at, published_at, MILLISECOND) / 1000 AS delay_s
  FROM webhook_deliveries
  WHERE delivered_at >= @since
    AND delivered_at < @until
    AND (ARRAY_LENGTH(@tenants) = 0 OR tenant IN UNNEST(@tenants))
    AND (ARRAY_LENGTH(@models) = 0 OR model IN UNNEST(@models))
  QUALIFY ROW_NUMBER() OVER (PARTITION BY delivered_at, row_id ORDER BY attempt DESC) = 1
),
-- Attempts are numbered by time, because their own numbers are missing if Redis was unreachable.
attempts AS (
  SELECT
    tenant,
    event,
    delivery_id,
    outcome,
    delay_s,
    ROW_NUMBER() OVER (PARTITION BY delivery_id ORDER BY delivered_at, row_id) AS number
  FROM once
),
events AS (
  SELECT
    tenant,
    event,
    delivery_id,
    COUNT(*) AS attempts,
    LOGICAL_OR(outcome = 'delivered') AS is_delivered,
    LOGICAL_OR(outcome = 'delivered' AND number = 1) AS is_delivered_first,
    LOGICAL_OR(outcome IN ('refused', 'gone', 'forbidden')) AS is_given_up,
    MIN(IF(outcome = 'delivered', delay_s, NULL)) AS delay_s
  FROM attempts
  GROUP BY tenant, event, delivery_id
),
answers AS (
  SELECT tenant, event, answer, COUNT(*) AS times
  FROM once
  WHERE outcome != 'delivered'
  GROUP BY tenant, event, answer
),
top_answers AS (
  SELECT tenant, event, answer
  FROM answers
  WHERE TRUE
  QUALIFY ROW_NUMBER() OVER (PARTITION BY tenant, event ORDER BY times DESC, answer) = 1
),
durations AS (
  SELECT tenant, event, APPROX_QUANTILES(duration_ms, 100)[SAFE_OFFSET(95)] AS p95_ms
  FROM once
  GROUP BY tenant, event
),
sums AS (
  SELECT
    tenant,
    event,
    COUNT(*) AS events,
    SUM(attempts) AS attempts,
    COUNTIF(is_delivered) AS delivered,
    COUNTIF(is_delivered_first) AS delivered_first,
    COUNTIF(is_given_up AND NOT is_delivered) AS given_up,
    APPROX_QUANTILES(delay_s, 100) AS delays_s
  FROM events
  GROUP BY tenant, event
)
SELECT
  tenant,
  event,
  events,
  attempts,
  ROUND(100 * SAFE_DIVIDE(delivered, events), 2) AS delivered_percent,
  ROUND(100 * SAFE_DIVIDE(delivered_first, events), 2) AS first_try_percent,
  given_up,
  events - delivered - given_up AS open,
  ROUND(p95_ms, 1) AS duration_p95_ms,
  ROUND(delays_s[SAFE_OFFSET(50)], 3) AS delay_p50_s,
  ROUND(delays_s[SAFE_OFFSET(95)], 3) AS delay_p95_s,
  answer AS top_failure
FROM sums
LEFT JOIN durations USING (tenant, event)
LEFT JOIN top_answers USING (tenant, event)
ORDER BY delivered_percent, events DESC, tenant, event
