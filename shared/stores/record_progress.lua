-- Notes the progress of a job that is being processed.
--
-- KEYS: record, who watches it
-- ARGV: step, steps; 0 of 0: others note it
-- Returns whether somebody wants previews of it.

if redis.call('HGET', KEYS[1], 'state') ~= 'processing' then return 0 end
if ARGV[2] ~= '0' then redis.call('HSET', KEYS[1], 'step', ARGV[1], 'steps', ARGV[2]) end
return redis.call('EXISTS', KEYS[2])
