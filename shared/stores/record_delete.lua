-- Deletes a prediction that is over. What stays for a while says only that its job is over, so that
-- a late delivery computes nothing.
-- Follows retention.lua, record_budget.lua and record_states.lua.
--
-- KEYS: record, store, then other keys of the prediction
-- ARGV: seconds to keep what stays
-- Returns 1: deleted, 0: there is none, -1: it is not over.

local state = redis.call('HGET', KEYS[1], 'state')
if not state then return 0 end
if not is_over(state) then return -1 end
drop(KEYS[2], KEYS[1])
redis.call('HSET', KEYS[1], 'state', 'canceled')
redis.call('EXPIRE', KEYS[1], ARGV[1])
for i = 3, #KEYS do redis.call('DEL', KEYS[i]) end
return 1
