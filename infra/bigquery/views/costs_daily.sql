-- Charges by day in the billing time zone, as counted on invoices, for the days in daily_usage.
-- column day: day in the billing time zone; the partition
-- column tenant: the tenant
-- column key_id: public part of the API key; NULL if no key was required, and in rows from older releases
-- column plan: the tenant's plan
-- column model: model name in the catalog
-- column price_version: version of the price in the catalog
-- column requests: requests, including rejected ones
-- column items: texts or images, excluding rejected requests
-- column succeeded: delivered items
-- column charged_tokens: tokens times the share that is charged; multiply by the token price to get the cost
-- column charged_pixel_steps: pixel-steps times the share that is charged
-- column list_price_usd: list price of the work, before any share is applied
-- column cost_usd: amount charged, not rounded
-- column made_at: time at which the day was last aggregated
SELECT
  day,
  tenant,
  key_id,
  plan,
  model,
  price_version,
  requests,
  items,
  succeeded,
  charged_tokens,
  charged_pixel_steps,
  list_price_usd,
  cost_usd,
  made_at
FROM `${project}.${dataset}.daily_usage`
WHERE ${only}
