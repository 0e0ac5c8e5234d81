-- Lets no further item of a run of a flow count, and notifies the workers. The first reason stays.
-- Follows record_states.lua.
--
-- KEYS: record
-- ARGV: reason, channel, id

local f = redis.call('HMGET', KEYS[1], 'state', 'closed', 'keep_s')
if not f[3] or f[2] or is_over(f[1]) then return 0 end
redis.call('HSET', KEYS[1], 'closed', ARGV[1])
redis.call('PUBLISH', ARGV[2], ARGV[3])
return 1
