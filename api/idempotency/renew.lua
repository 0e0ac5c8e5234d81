-- Renews the leases of claims, and removes those that ran out. Follows now.lua.
--
-- KEYS: leases
-- ARGV: lease_s, claims

redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i]) end
return 1
