-- Adds to counts that expire.
--
-- KEYS: counts
-- ARGV: seconds to keep them, then name, count of each

for i = 2, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
