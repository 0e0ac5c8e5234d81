-- Amounts that each tenant owes, by month, model, price, share of the price, and outcome.
-- owner: finance
-- audience: tenants
-- days: 1
-- range: months
-- plot: bars amount_usd by tenant, one color per model
-- totals: items, list_usd, amount_usd
-- column tenant: the tenant
-- column month: first day of the month, in the time zone
-- column model: model name in the catalog
-- column unit: tokens, images, pages, seconds, characters, or requests to other custom models
-- column price_version: version of the price in the catalog; NULL in rows from older releases
-- column price_per: number of units that unit_price_usd pays for: a million tokens, or 1 of any other unit
-- column unit_price_usd: price of price_per units, before any share; for texts, images, and custom models, the line's average price; NULL for old rows without a charge or a price
-- column kind: computed, cached (including joined), failed, expired, or canceled
-- column charged_share: share of the price that is charged
-- column items: texts, images, or predictions
-- column quantity: number of units
-- column list_usd: quantity times unit price, divided by price_per
-- column amount_usd: amount charged, which is the sum of the rows' costs and equals quantity x unit price / price_per x share, except for the last digits
WITH once AS (
  SELECT
    tenant,
    model,
    received_at,
    status,
    cache,
    price_version,
    cost_usd,
    COALESCE(list_price_usd, SAFE_DIVIDE(cost_usd, COALESCE(charged_share, IF(cost_usd > 0, 1.0, 0.0)))) AS item_list_usd,
    output_tokens IS NOT NULL OR task IN ('custom', 'image') AS has_many_prices,
    -- Rows without the column: a line in requests.
    COALESCE(work_unit, CASE task WHEN 'custom' THEN 'requests' WHEN 'image' THEN 'images' ELSE 'tokens' END) AS unit,
    CASE task
      WHEN 'custom' THEN IF(status = 'succeeded' OR charged_share > 0, IF(work_unit IS NULL, 1, COALESCE(work, 0)), 0)
      WHEN 'image' THEN 1
      ELSE COALESCE(tokens, 0)
    END AS units,
    IF(task IN ('custom', 'image'), 1, 1000000) AS price_per,
    -- Rows without the column: the full price was charged.
    COALESCE(charged_share, IF(cost_usd > 0, 1.0, 0.0)) AS share
  FROM `rows`
  WHERE received_at >= @since
    AND received_at < @until
    AND (ARRAY_LENGTH(@tenants) = 0 OR tenant IN UNNEST(@tenants))
    AND (ARRAY_LENGTH(@models) = 0 OR model IN UNNEST(@models))
  QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
),
priced AS (
  SELECT
    *,
    -- Nine decimals of a dollar for a million units: finer than any price, coarser than the error of a double.
    IF(has_many_prices, NULL, ROUND(price_per * SAFE_DIVIDE(item_list_usd, units), 9)) AS item_price_usd
  FROM once
  WHERE status != 'refused'
)
SELECT
  tenant,
  DATE_TRUNC(DATE(received_at, @tz), MONTH) AS month,
  model,
  unit,
  price_version,
  price_per,
  -- An average price: finer than a line's rounding, coarser than the error of a double.
  COALESCE(
    item_price_usd,
    IF(
      price_per = 1,
      ROUND(SAFE_DIVIDE(SUM(item_list_usd), SUM(units)), 15),
      ROUND(price_per * SAFE_DIVIDE(SUM(item_list_usd), SUM(units)), 12)
    )
  ) AS unit_price_usd,
  CASE
    WHEN status != 'succeeded' THEN status
    WHEN cache IN ('memory', 'redis', 'joined') THEN 'cached'
    ELSE 'computed'
  END AS kind,
  share AS charged_share,
  COUNT(*) AS items,
  SUM(units) AS quantity,
  SUM(item_list_usd) AS list_usd,
  -- Rounded far below a cent, so that the order of the sum does not affect rounding.
  ROUND(SUM(cost_usd), 13) AS amount_usd
FROM priced
GROUP BY tenant, month, model, unit, price_version, price_per, item_price_usd, kind, charged_share
ORDER BY tenant, month, model, unit, unit_price_usd, price_version, charged_share DESC, kind
