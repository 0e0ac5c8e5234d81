-- Stores a document that may change, or replaces one that nobody changed in the meantime. It counts
-- as a prediction that has ended. Follows retention.lua and record_budget.lua.
--
-- KEYS: record, store
-- ARGV: now, keep_s ('' leaves its end as it is), tenant, document,
--       SHA-1 of the document that it replaces ('' if it is new), budget of the store
-- Returns 1: stored, 0: another document is there, or none, -1: no room. Then how many predictions
-- were dropped for it.

local store, now, keep_s, tenant, document, replaced =
  KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
drop_expired(store, now)
local there = redis.call('HGET', KEYS[1], 'document')
if replaced == '' and redis.call('EXISTS', KEYS[1]) == 1 then return {0, 0} end
if replaced ~= '' and (not there or redis.sha1hex(there) ~= replaced) then return {0, 0} end
local growth = #document - (there and #there or -ENTRY_BYTES)
local has_room, dropped = true, 0
if growth > 0 then
  has_room, dropped = find_room(store, tenant, growth, tonumber(ARGV[6]), now)
  -- It may have been the oldest of its tenant itself.
  if replaced ~= '' and redis.call('HEXISTS', KEYS[1], 'document') == 0 then return {0, dropped} end
end
if not has_room then return {-1, dropped} end
redis.call('HSET', KEYS[1], 'document', document)
if replaced == '' then redis.call('HSET', KEYS[1], 'state', 'succeeded', 'created_at_s', now) end
local bytes = counted(store, KEYS[1])
if keep_s ~= '' then
  redis.call('HSET', KEYS[1], 'keep_s', keep_s)
  keep(store, KEYS[1], tenant, bytes + growth, now)
  redis.call('ZADD', store .. ':ends', now + keep_s, KEYS[1])
else
  local may_go = redis.call('ZSCORE', store .. ':may_go:' .. tenant, KEYS[1]) or now
  keep(store, KEYS[1], tenant, bytes + growth, may_go)
end
return {1, dropped}
