-- Adds an attempt to the log of a prediction's webhooks. The oldest leaves a full log.
--
-- KEYS: record, log, counts of attempts by webhook-id
-- ARGV: webhook-id, entry, most entries, seconds to keep it

if redis.call('HEXISTS', KEYS[1], 'document') == 0 then return 0 end
local attempt = redis.call('HINCRBY', KEYS[3], ARGV[1], 1)
redis.call('RPUSH', KEYS[2], attempt .. ' ' .. ARGV[2])
redis.call('LTRIM', KEYS[2], -tonumber(ARGV[3]), -1)
redis.call('EXPIRE', KEYS[2], ARGV[4])
redis.call('EXPIRE', KEYS[3], ARGV[4])
return attempt
