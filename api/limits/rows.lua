-- Adds to budgets what their rows say and the counter lacks. Follows now.lua and months.lua.
--
-- KEYS: one for each budget, then budgets by the time in ms at which they changed (totals.lua)
-- ARGV: JSON: [{name, month, rows, seen, lowers}, ...], one for each budget.
--   rows: the sum of rows of requests that were answered before an earlier reading of this budget.
--   Negative: only read.
--   seen: `used` less `raised` at that reading.
--   lowers: also subtract, if nothing is held.
-- Returns JSON: [{at_ms, used, raised, held, added}, ...] of that month.
--
-- `raised` is the sum of all that this script has added. At the reading, `used` had at least what the
-- counter knew of those rows, so rows less `used` are missing. What was added since then is in `raised`,
-- and what was used since then is not in the rows. So nothing is added twice, whoever asks how often.

local changed = KEYS[#KEYS]
local answers = {}
for index, one in ipairs(cjson.decode(ARGV[1])) do
  local key, budget = KEYS[index], months.read(KEYS[index])
  local _, held = months.held(key, one.month, budget.fields, '')
  local field = 'raised:' .. whole(one.month)
  local used, raised = budget.used[one.month] or 0, tonumber(budget.fields[field] or 0)
  local added = 0
  if one.rows >= 0 and one.month >= budget.newest - 1 then
    local missing = one.rows - one.seen - raised
    if missing > ROUNDING_USD then added = missing end
    if missing < -ROUNDING_USD and one.lowers and held == 0 then added = missing end
  end
  if added ~= 0 then
    if one.month > budget.newest then
      months.forget(key, one.month - 1)
      budget.newest = one.month
    end
    used, raised = math.max(0, used + added), raised + added
    budget.used[one.month] = used
    months.write(key, budget)
    redis.call('HSET', key, field, string.format('%.17g', raised))
    redis.call('ZADD', changed, now_ms, one.name)
  end
  answers[index] = {at_ms = now_ms, used = used, raised = raised, held = held, added = added}
end
return #answers > 0 and cjson.encode(answers) or '[]'
