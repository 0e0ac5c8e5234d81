-- Ends the lease of an inbox if it is ours.
--
-- KEYS: lease
-- ARGV: instance

if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
