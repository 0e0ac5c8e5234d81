-- Releases a claim, so that the job does not count as one that killed its worker.
-- Follows record_states.lua.
--
-- KEYS: record

local f = redis.call('HMGET', KEYS[1], 'state', 'open')
if not f[1] or is_over(f[1]) then return 0 end
local open = math.max(0, tonumber(f[2] or 0) - 1)
redis.call('HSET', KEYS[1], 'open', open)
if open == 0 then redis.call('HSET', KEYS[1], 'state', 'starting') end
return 1
