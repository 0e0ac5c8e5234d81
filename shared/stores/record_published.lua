-- Notes that the broker has the job of a prediction.
-- HSET alone would create a record that was dropped in the meantime, and nothing would remove it.
--
-- KEYS: record

if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'published', 1)
return 1
