-- Stores the response for a key. Follows retention.lua and now.lua.
-- The first response stays: a claim whose lease ran out may still finish before its successor.
--
-- KEYS: entry, store, leases
-- ARGV: fingerprint, claim, response, keep_s, tenant, budget of the store
-- Returns the stored response, and how many others were dropped to make room.

redis.call('ZREM', KEYS[3], ARGV[2])
local f = redis.call('HMGET', KEYS[1], 'fingerprint', 'answer')
if f[1] and f[1] ~= ARGV[1] then return {'', 0} end
if f[2] then return {f[2], 0} end
local bytes = #ARGV[3] + ENTRY_BYTES
local _, dropped = make_room(KEYS[2], bytes, tonumber(ARGV[6]), now)
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1], 'claim', ARGV[2], 'answer', ARGV[3])
keep(KEYS[2], KEYS[1], ARGV[5], bytes, now)
redis.call('ZADD', KEYS[2] .. ':ends', now + ARGV[4], KEYS[1])
return {ARGV[3], dropped}
