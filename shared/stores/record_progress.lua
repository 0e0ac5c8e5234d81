-- Notes the progress of a job that is being processed.
--
-- KEYS: record, who watches it
-- ARGV: step, steps
-- Returns whether somebody wants previews of it.

if redis.call('HGET', KEYS[1], 'state') ~= 'processing' then return 0 end
redis.call('HSET', KEYS[1], 'step', ARGV[1], 'steps', ARGV[2])
return redis.call('EXISTS', KEYS[2])
