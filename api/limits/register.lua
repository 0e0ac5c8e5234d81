-- Registers an instance among those that count. Follows now.lua.
--
-- KEYS: the sorted set of instances, by the time at which they no longer count
-- ARGV: instance, lifetime in ms
-- Returns the rank of the instance by name, from 0, and how many instances there are.

redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
redis.call('ZADD', KEYS[1], now_ms + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local names = redis.call('ZRANGE', KEYS[1], 0, -1)
table.sort(names)
for rank, name in ipairs(names) do
  if name == ARGV[1] then return {rank - 1, #names} end
end
