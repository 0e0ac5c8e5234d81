-- Renews the lease of an inbox. Redis may have forgotten the lease (restart, eviction). Then the
-- inbox is ours again, unless another instance was faster.
--
-- KEYS: lease
-- ARGV: instance, milliseconds
-- Returns 1 if the inbox is ours.

local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
