-- Creates the record of a prediction. Follows retention.lua and record_budget.lua.
--
-- KEYS: record, store, index of the tenant, line of those that wait for the model, its pace
-- ARGV: now, deadline, keep_s, tenant, id, document, most in the tenant's index,
--       bytes that the reply may take, budget of the store, hold ('' if there is none), creation
--       time to list it with
-- Returns 1: created, 0: exists, -1: no room. Then how many other predictions were dropped for it,
-- and how many of the tenant have not ended, this one included.
--
-- Predictions are promised, and Redis evicts what has a TTL when it is full (volatile-lru). So they
-- have none, and each new prediction removes some that expired.

local LATE_S = 6        -- this long after its deadline a prediction is over, or a reader ends it
local ABANDONED_S = 120 -- a prediction that has not ended this long after its deadline may go

local store, now, deadline, tenant, id, document =
  KEYS[2], ARGV[1], ARGV[2], ARGV[4], ARGV[5], ARGV[6]
local wanted, budget = #document + ARGV[8] + ENTRY_BYTES, tonumber(ARGV[9])
drop_expired(store, now)
if redis.call('EXISTS', KEYS[1]) == 1 then return {0, 0, 0} end
local hold = ARGV[10] ~= '' and redis.sha1hex(ARGV[10])
if hold and redis.call('DEL', store .. ':void:' .. hold) == 1 then return {0, 0, 0} end
local has_room, dropped = find_room(store, tenant, wanted, budget, now)
if not has_room then return {-1, dropped, 0} end
redis.call('HSET', KEYS[1],
  'state', 'starting', 'created_at_s', now, 'keep_s', ARGV[3], 'document', document)
keep(store, KEYS[1], tenant, wanted, deadline + ABANDONED_S)
if hold then
  redis.call('HSET', KEYS[1], 'hold', hold) -- which was created with it, also when it is settled
  redis.call('HSET', store .. ':holds', KEYS[1], ARGV[10])
  redis.call('ZADD', store .. ':held', deadline + LATE_S, KEYS[1])
end
redis.call('ZADD', store .. ':ends', deadline + ARGV[3], KEYS[1])
redis.call('ZADD', KEYS[3], ARGV[11], id)
-- The line is cleaned when it is read. It ends with the last deadline in it.
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now)
if redis.call('EXISTS', KEYS[4]) == 0 then redis.call('DEL', KEYS[5]) end
redis.call('ZADD', KEYS[4], deadline, KEYS[1])
local left_s = math.max(1, math.ceil(deadline - now))
if redis.call('TTL', KEYS[4]) < left_s then redis.call('EXPIRE', KEYS[4], left_s) end
redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -tonumber(ARGV[7]) - 1)
return {1, dropped, redis.call('ZCOUNT', store .. ':may_go:' .. tenant, '(' .. now, '+inf')}
