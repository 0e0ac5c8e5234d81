-- What each day was charged, in the billing zone, as invoices count it: of the days that are in daily_usage.
-- column day: day of the billing zone; the partition
-- column tenant: who pays
-- column key_id: the public part of the API key
-- column plan: the tenant's plan
-- column model: its name in the catalog
-- column price_version: which price of the catalog
-- column requests: requests, the refused ones too
-- column items: texts or images, without those of refused requests
-- column succeeded: items that were delivered
-- column charged_tokens: tokens times the share that is charged
-- column charged_pixel_steps: pixel-steps times the share that is charged
-- column list_price_usd: what the work costs before any share
-- column cost_usd: what was charged; not rounded
-- column made_at: when the day was summed up, the last time
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
