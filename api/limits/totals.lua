-- Says what was used of the budgets that changed lately. Follows now.lua.
--
-- KEYS: budgets by the time in ms at which they changed (take.lua)
-- ARGV: the time since when, most of them, what the keys of their hashes begin with, lifetime in ms
-- Returns the time in ms, how many changed since, and of the latest: key, month, used of it, used of
-- the month before.

local MAX_KEPT = 100000

redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -MAX_KEPT - 1)
redis.call('PEXPIRE', KEYS[1], ARGV[4])
local totals = {}
local changed = redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, key in ipairs(changed) do
  local f = redis.call('HMGET', ARGV[3] .. key, 'month', 'used', 'used_before')
  if f[1] then table.insert(totals, {key, f[1], f[2] or '0', f[3] or '0'}) end
end
return {now_ms, redis.call('ZCOUNT', KEYS[1], ARGV[1], '+inf'), totals}
