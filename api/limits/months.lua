-- Reads budgets. Follows now.lua. Scripts that need it follow it.
--
-- A budget is a hash: `month` (the newest), `used` of it, `used_before` of the month before,
-- `held:MONTH:INSTANCE` (what an instance may still give back, and until when this counts),
-- `alone:MONTH:PROCESS` (take.lua), `raised:MONTH` (rows.lua) and `warned:MONTH:SHARE`.

local ROUNDING_USD = 1e-9 -- sums of doubles
local HELD = '^held:(%d+):(.*)$'
local months = {}

local function whole(number) return string.format('%.0f', number) end

-- The newest month of a budget, what was used of the months, and all its fields.
function months.read(key)
  local fields, entries = {}, redis.call('HGETALL', key)
  for at = 1, #entries, 2 do fields[entries[at]] = entries[at + 1] end
  local kept = tonumber(fields.month or 0)
  local used = {[kept] = tonumber(fields.used or 0), [kept - 1] = tonumber(fields.used_before or 0)}
  return {newest = kept, used = used, fields = fields}
end

function months.forget(key, before)
  for _, field in ipairs(redis.call('HKEYS', key)) do
    local of = string.match(field, '^%a+:(%d+)')
    if tonumber(of or before) < before then redis.call('HDEL', key, field) end
  end
end

-- Amounts held of a period, by this instance and by others.
function months.held(key, period, fields, instance)
  local own, others = 0, 0
  for field, value in pairs(fields) do
    local of, holder = string.match(field, HELD)
    if of then
      local held, ends_ms = string.match(value, '^(%S+) (%d+)$')
      if tonumber(ends_ms) <= now_ms then
        redis.call('HDEL', key, field)
      elseif tonumber(of) == period and holder == instance then
        own = tonumber(held)
      elseif tonumber(of) == period then
        others = others + tonumber(held)
      end
    end
  end
  return own, others
end

function months.write(key, budget)
  local newest, used = budget.newest, budget.used
  redis.call('HSET', key, 'month', whole(newest), 'used', string.format('%.17g', used[newest] or 0),
    'used_before', string.format('%.17g', used[newest - 1] or 0))
end
