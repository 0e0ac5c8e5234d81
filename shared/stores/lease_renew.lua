-- Takes a lease, or renews it. Redis may have forgotten the lease (restart, eviction). Then it is
-- ours again, unless another holder was faster.
--
-- KEYS: lease
-- ARGV: holder, milliseconds
-- Returns 1 if the lease is ours.

local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
