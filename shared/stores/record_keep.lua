-- Keeps an answer that was given without a record, as a prediction that succeeded.
-- Follows retention.lua and record_budget.lua.
--
-- KEYS: record, store, index of the tenant
-- ARGV: now, when it was created, keep_s, tenant, id, document, reply, most in the tenant's index,
--       budget of the store
-- Returns 1: kept, 0: exists, -1: no room. Then how many other predictions were dropped for it.

local store, now, keep_s, tenant, document, reply =
  KEYS[2], ARGV[1], ARGV[3], ARGV[4], ARGV[6], ARGV[7]
local wanted = #document + #reply + ENTRY_BYTES
drop_expired(store, now)
if redis.call('EXISTS', KEYS[1]) == 1 then return {0, 0} end
local has_room, dropped = find_room(store, tenant, wanted, tonumber(ARGV[9]), now)
if not has_room then return {-1, dropped} end
redis.call('HSET', KEYS[1],
  'state', 'succeeded', 'created_at_s', ARGV[2], 'started_at_s', ARGV[2], 'ended_at_s', now,
  'keep_s', keep_s, 'published', 1, 'document', document, 'reply', reply)
keep(store, KEYS[1], tenant, wanted, now)
redis.call('ZADD', store .. ':ends', now + keep_s, KEYS[1])
redis.call('ZADD', KEYS[3], ARGV[2], ARGV[5])
redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -tonumber(ARGV[8]) - 1)
return {1, dropped}
