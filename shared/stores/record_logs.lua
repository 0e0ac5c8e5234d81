-- Notes what the model has printed for a job that is being processed, by the worker that holds it.
--
-- KEYS: record
-- ARGV: attempt, characters that are left out before, the others

local f = redis.call('HMGET', KEYS[1], 'state', 'attempts')
if f[1] == 'processing' and tonumber(f[2] or 0) <= tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'logs_left_out', ARGV[2], 'logs', ARGV[3])
end
return 0
