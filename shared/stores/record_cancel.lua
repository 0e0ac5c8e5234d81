-- Ends a record as canceled unless it is over, and notifies the workers.
-- A job that no worker claimed yet gets its record here, so that a later claim finds it canceled.
-- Follows retention.lua, record_budget.lua and record_states.lua.
--
-- KEYS: record, store
-- ARGV: now, seconds to keep the record of a job that is not a prediction, channel, id
-- Returns the state.

local f = redis.call('HMGET', KEYS[1], 'state', 'keep_s')
if is_over(f[1]) then return f[1] end
redis.call('HSET', KEYS[1], 'state', 'canceled', 'canceled_at_s', ARGV[1])
if f[2] then
  ended(KEYS[2], KEYS[1], ARGV[1], f[2])
else
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
redis.call('PUBLISH', ARGV[3], ARGV[4])
return 'canceled'
