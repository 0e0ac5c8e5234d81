-- Takes from several limits at once, or from none of them. Follows now.lua and months.lua.
--
-- KEYS: one for each limit, then budgets by the time at which they changed (totals.lua), holds, the
-- times at which they are due (shared/stores/holds.py), the instance's calls, and operations
-- ARGV: instance, lifetime of slots in ms,
-- JSON: [{key, kind, limit, need, extra, returns, held, month, operation, used, owner}, ...],
-- the record whose hold this settles ('' if none; without its hold nothing is given back),
-- the number of this call (0 if it is not remembered), the lowest number of a call that the instance has
-- no answer to, the lifetime of calls in ms, and what tells the process from others of this instance.
-- Returns JSON: [{granted, used, period, fits, retry_ms, reset_ms, held}, ...]. If one does not fit,
-- nothing is granted.
--
-- held: of a month, what of `used` the instance may give back, `need` included. It is kept for as long
-- as slots are, so what a dead instance reserved counts as spent. The answer has what all may give
-- back: if a request fits without that, it is worth asking again soon, and retry_ms is 0.
-- kind: `window` (of a minute), `month` (a calendar month, UTC) or `slots` (held by instances).
-- need: what the request needs. extra: what the instance would like beyond that, for later requests.
-- It gets that from limits that are far from full: at most a SLICES-th part of what is left, and
-- nothing if that is less than the need.
-- returns: [[period, amount], ...], unused amounts taken in a period. Negative: used in addition.
-- operation: whose reservation comes back whole, but for what it has `used`. If the same operation was
-- counted before, because another process began with it, that amount comes back too. All asks of a call
-- have the same.
-- month: that the request arrived in, of this budget. 0: the current one. Its rows are of that month,
-- so it counts there too if it is late: a line of a batch, or a request of the last second. A budget
-- has the month before the current one besides. A request of an older one counts as of that, and what
-- comes back of an older one counts nothing, as nothing is known of it any more.
-- Period -1 is the current one, of a budget `month`. It says what was taken without Redis. A part of that may
-- come back before it is told, as any instance settles a prediction. So it is counted for the process that
-- took it (`owner`, by default the one that asks), and counts as used once more was told than came back. Of slots, need is how many the instance holds in all, not how many it
-- adds, so a lost answer does no harm.
--
-- A call counts once. Its answer, but for slots, is kept until the instance has it, so that it can ask
-- again. Calls that the instance has the answers to count nothing: such a one is a copy that came late,
-- over a connection that was given up. The calls of an instance are a hash with `lowest` and the kept
-- answers by number (Lee et al., Implementing Linearizability at Large Scale and Low Latency, SOSP 2015).
--
-- A window is a hash with the amount of each bucket, their sum, and the first and the last bucket.
-- It covers a minute, the bucket that is not over, and the LEASE_BUCKETS for which an instance may
-- still use what it has taken. So no 60 seconds see more than the limit.

local BUCKET_MS, LEASE_BUCKETS, SLICES = 250, 1, 64
local BUCKETS = 60000 / BUCKET_MS + 1 + LEASE_BUCKETS
local SKEW_MS = 60000 -- by so much the clocks of instances may be ahead at the turn of a month

local instance, slots_ms, asked = ARGV[1], tonumber(ARGV[2]), cjson.decode(ARGV[3])
local changed, holds = KEYS[#asked + 1], KEYS[#asked + 2]
local due, calls, operations = KEYS[#asked + 3], KEYS[#asked + 4], KEYS[#asked + 5]
local call, lowest = tonumber(ARGV[5]), tonumber(ARGV[6])
if call > 0 then
  local kept = redis.call('HMGET', calls, ARGV[5], 'lowest')
  local before = tonumber(kept[2] or lowest)
  if kept[1] or call < before then return kept[1] or '[]' end
  for answered = before, lowest - 1 do redis.call('HDEL', calls, whole(answered)) end
end

local was_settled = false
if ARGV[4] ~= '' then
  was_settled = redis.call('HDEL', holds, ARGV[4]) == 0
  redis.call('ZREM', due, ARGV[4])
end

local windows = {}

function windows.open(key)
  local found = redis.call('HMGET', key, 'first', 'last', 'used')
  local now = math.floor(now_ms / BUCKET_MS)
  local first, last, used =
    tonumber(found[1] or now), tonumber(found[2] or now), tonumber(found[3] or 0)
  now = math.max(now, last) -- the clock of a Redis that took over may be behind
  local gone = now - BUCKETS
  if last <= gone then
    redis.call('DEL', key)
    first, used = now, 0
  elseif first <= gone then
    local left = {}
    for bucket = first, gone do left[#left + 1] = whole(bucket) end
    for _, amount in ipairs(redis.call('HMGET', key, unpack(left))) do
      used = used - tonumber(amount or 0)
    end
    redis.call('HDEL', key, unpack(left))
    first = gone + 1
  end
  return {used = used, period = now, first = first}
end

function windows.give_back(key, state, period, amount)
  if period < state.first or period > state.period then return end
  local field = whole(period)
  amount = math.min(amount, tonumber(redis.call('HGET', key, field) or 0))
  if amount == 0 then return end -- negative zero is no integer to HINCRBY
  redis.call('HINCRBY', key, field, whole(-amount))
  state.used = math.max(0, state.used - amount)
end

function windows.take(key, state, amount)
  if amount > 0 then redis.call('HINCRBY', key, whole(state.period), whole(amount)) end
  state.used = state.used + amount
  if redis.call('EXISTS', key) == 0 then return end
  redis.call('HSET', key, 'first', whole(state.first), 'last', whole(state.period),
    'used', whole(state.used))
  redis.call('PEXPIRE', key, BUCKETS * BUCKET_MS)
end

function windows.retry_ms(key, state, one)
  local wanted = state.used + one.need - one.limit
  for bucket = state.first, state.period do
    wanted = wanted - tonumber(redis.call('HGET', key, whole(bucket)) or 0)
    if wanted <= 0 then return (bucket + BUCKETS) * BUCKET_MS - now_ms end
  end
  return BUCKETS * BUCKET_MS
end

function windows.reset_ms(key, state)
  if state.used <= 0 then return 0 end
  return (state.period + BUCKETS) * BUCKET_MS - now_ms
end

-- Days of the civil calendar: howardhinnant.github.io/date_algorithms.html, civil_from_days and back.
local function month_of(unix_ms)
  local shifted = math.floor(unix_ms / 86400000) + 719468
  local era = math.floor(shifted / 146097)
  local day = shifted - era * 146097
  local year = math.floor(
    (day - math.floor(day / 1460) + math.floor(day / 36524) - math.floor(day / 146096)) / 365)
  local of_year = day - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local month = math.floor((5 * of_year + 2) / 153)
  return (era * 400 + year) * 12 + month + 2 -- months since year 0, January is 0
end

local function start_ms(months)
  local year, month = math.floor((months - 2) / 12), (months - 2) % 12
  local era = math.floor(year / 400)
  local of_era = year - era * 400
  local day = math.floor((153 * month + 2) / 5)
    + of_era * 365 + math.floor(of_era / 4) - math.floor(of_era / 100)
  return (era * 146097 + day - 719468) * 86400000
end

local budgets = {} -- by key, as a call may be about two months of one

function months.open(key, one)
  local budget = budgets[key] or months.read(key)
  budgets[key] = budget
  local month, wanted = month_of(now_ms), one.month or 0
  if wanted == month + 1 and now_ms + SKEW_MS >= start_ms(month + 1) then month = month + 1 end
  month = math.max(month, budget.newest)
  if budget.newest < month then months.forget(key, month - 1) end
  budget.newest = month
  local period = month
  if wanted > 0 then period = math.min(month, math.max(month - 1, wanted)) end
  local is_over = wanted > 0 and wanted < period
  local own_held, others_held = months.held(key, period, budget.fields, instance)
  return {
    name = one.key, budget = budget, used = budget.used[period] or 0, period = period, is_over = is_over,
    own_held = own_held, others_held = others_held,
  }
end

-- An ask for a month that is over, and one for the month that it counts as, may be in one call. So what
-- comes back is noted at once with the budget, which both share.
function months.give_back(key, state, period, amount, owner)
  state.came_back = true
  if state.is_over and period ~= state.period then return end
  if period == -1 then
    period = state.period
    amount = months.give_back_alone(key, state, amount, owner)
  end
  local used = state.budget.used
  used[period] = math.max(0, (used[period] or 0) - amount)
  if period == state.period then state.used = used[period] end
end

-- Returns by how much less is used, of a part of what a process took without Redis.
function months.give_back_alone(key, state, amount, owner)
  local field, fields = 'alone:' .. whole(state.period) .. ':' .. owner, state.budget.fields
  local before = tonumber(fields[field] or 0)
  local after = before - amount
  if math.abs(after) > ROUNDING_USD then
    fields[field] = string.format('%.17g', after)
    redis.call('HSET', key, field, fields[field])
  else
    fields[field] = nil
    redis.call('HDEL', key, field)
  end
  return math.max(0, before) - math.max(0, after)
end

function months.take(key, state, amount, one)
  local all = state.budget.used
  state.used = (all[state.period] or 0) + amount
  all[state.period] = state.used
  if amount ~= 0 or state.came_back then redis.call('ZADD', changed, now_ms, state.name) end
  months.write(key, state.budget)
  if (one.held or -1) >= 0 and not state.is_over then
    local field = 'held:' .. whole(state.period) .. ':' .. instance
    state.own_held = math.max(0, one.held - one.need + amount)
    if state.own_held > 0 then
      local value = string.format('%.17g', state.own_held) .. ' ' .. whole(now_ms + slots_ms)
      redis.call('HSET', key, field, value)
    else
      redis.call('HDEL', key, field)
    end
  end
  state.held = math.min(state.used, state.others_held + state.own_held)
end

function months.reset_ms(_, state) return math.max(0, start_ms(state.period + 1) - now_ms) end

function months.retry_ms(_, state, one)
  local own = state.own_held
  if (one.held or -1) >= 0 then own = math.max(0, one.held - one.need) end
  local spent = state.used - state.others_held - own
  if one.need <= one.limit - spent + ROUNDING_USD then return 0 end
  return months.reset_ms(_, state)
end

local slots = {}

function slots.open(key)
  local used, own, entries = 0, 0, redis.call('HGETALL', key)
  for at = 1, #entries, 2 do
    local held, ends_ms = string.match(entries[at + 1], '^(%d+) (%d+)$')
    if tonumber(ends_ms) <= now_ms then
      redis.call('HDEL', key, entries[at])
    elseif entries[at] == instance then
      own = tonumber(held)
    else
      used = used + tonumber(held)
    end
  end
  return {used = used, own = own, period = 0}
end

function slots.give_back() end

function slots.take(key, state, amount)
  if amount > 0 then
    redis.call('HSET', key, instance, whole(amount) .. ' ' .. whole(now_ms + slots_ms))
    redis.call('PEXPIRE', key, slots_ms)
  else
    redis.call('HDEL', key, instance)
  end
  state.used = state.used + amount
end

function slots.retry_ms() return 0 end

function slots.reset_ms() return 0 end

local recounted = 0 -- what comes back of an operation in addition
if asked[1] and asked[1].operation ~= '' then
  local before = tonumber(redis.call('HGET', operations, asked[1].operation) or 0)
  recounted = before - asked[1].used
  redis.call('HSET', operations, asked[1].operation, string.format('%.17g', asked[1].used))
  redis.call('PEXPIRE', operations, ARGV[7])
end

local kinds = {window = windows, month = months, slots = slots}
local states, all_fit = {}, true
for index, one in ipairs(asked) do
  local kind, key = kinds[one.kind], KEYS[index]
  local state = kind.open(key, one)
  for _, back in ipairs(was_settled and {} or one.returns) do
    kind.give_back(key, state, back[1], back[2] + recounted, one.owner ~= '' and one.owner or ARGV[8])
  end
  local room = one.limit - state.used + (one.kind == 'month' and ROUNDING_USD or 0)
  state.fits = one.need <= math.max(state.own or 0, room)
  all_fit = all_fit and state.fits
  states[index] = state
end

-- cjson writes an empty table as an object.
local function encoded(list) return #list > 0 and cjson.encode(list) or '[]' end

local answers, kept = {}, {}
for index, one in ipairs(asked) do
  local kind, key, state = kinds[one.kind], KEYS[index], states[index]
  local granted = 0
  if all_fit then
    local slice = math.max(0, one.limit - state.used - one.need) / SLICES
    if one.kind ~= 'month' then slice = math.floor(slice) end
    if one.kind ~= 'slots' and slice < one.need then slice = 0 end -- near the limit it is exact
    granted = one.need + math.min(one.extra, slice)
  elseif one.kind == 'slots' then
    granted = state.own
  end
  local retry_ms = state.fits and 0 or kind.retry_ms(key, state, one)
  kind.take(key, state, granted, one)
  answers[index] = {
    granted = granted, used = state.used, period = state.period, fits = state.fits,
    retry_ms = retry_ms, reset_ms = kind.reset_ms(key, state), held = state.held or 0,
  }
  if one.kind ~= 'slots' then kept[#kept + 1] = answers[index] end
end
if call > 0 then
  redis.call('HSET', calls, ARGV[5], encoded(kept), 'lowest', ARGV[6])
  redis.call('PEXPIRE', calls, ARGV[7])
end
return encoded(answers)
