-- Keeps the input of a run of a flow and the budget of its steps, unless they are there.
--
-- KEYS: record, steps
-- ARGV: input, budget of the store
-- Returns 1, or 0 if there is no record.

if redis.call('HEXISTS', KEYS[1], 'keep_s') == 0 then return 0 end
redis.call('HSETNX', KEYS[2], 'input', ARGV[1])
redis.call('HSETNX', KEYS[2], 'budget', ARGV[2])
return 1
