-- Notes the progress of a job that is being processed.
--
-- KEYS: record
-- ARGV: step, steps

if redis.call('HGET', KEYS[1], 'state') ~= 'processing' then return 0 end
redis.call('HSET', KEYS[1], 'step', ARGV[1], 'steps', ARGV[2])
return 1
