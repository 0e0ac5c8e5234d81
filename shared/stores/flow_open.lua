-- Keeps the input of a run of a flow, unless it is there.
--
-- KEYS: record, steps
-- ARGV: input
-- Returns 1, or 0 if there is no record.

if redis.call('HEXISTS', KEYS[1], 'keep_s') == 0 then return 0 end
redis.call('HSETNX', KEYS[2], 'input', ARGV[1])
return 1
