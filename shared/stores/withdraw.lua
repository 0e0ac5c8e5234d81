-- Withdraws a revision, unless it is. What is cached of it is not found again, also not after the withdrawal ends.
--
-- KEYS: withdrawals
-- ARGV: the field of the revision, the field of its purges, the withdrawal
-- Returns whether it was not withdrawn before.

local is_first = redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[3])
if is_first == 1 then redis.call('HINCRBY', KEYS[1], ARGV[2], 1) end
return is_first
