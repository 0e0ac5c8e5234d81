-- Notes that a claimed job begins, or ends, to be the only one that its worker computes.
--
-- KEYS: record
-- ARGV: 1 if it begins, -1 if it ends

local f = redis.call('HMGET', KEYS[1], 'state', 'alone')
if f[1] ~= 'processing' then return 0 end
redis.call('HSET', KEYS[1], 'alone', math.max(0, tonumber(f[2] or 0) + ARGV[1]))
return 1
