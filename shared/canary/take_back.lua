-- Takes a canary back, unless it is taken back.
--
-- KEYS: taken-back
-- ARGV: reason, now, seconds to keep it
-- Returns 1 if it was not taken back before.

local first = redis.call('HSETNX', KEYS[1], 'reason', ARGV[1])
if first == 1 then
  redis.call('HSET', KEYS[1], 'at_s', ARGV[2])
  redis.call('EXPIRE', KEYS[1], ARGV[3])
end
return first
