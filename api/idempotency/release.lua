-- Releases a claim without a response, unless the key has another claim or a response.
--
-- KEYS: entry, store, leases
-- ARGV: claim

redis.call('ZREM', KEYS[3], ARGV[1])
local f = redis.call('HMGET', KEYS[1], 'claim', 'answer')
if f[1] ~= ARGV[1] or f[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2] .. ':ends', KEYS[1])
return 1
