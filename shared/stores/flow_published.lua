-- Notes that the broker has the first jobs of a step, unless the run was dropped in the meantime.
--
-- KEYS: record, steps
-- ARGV: the field that says so

if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], 1)
return 1
