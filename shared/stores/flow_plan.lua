-- Notes what a step of a flow computes: its jobs, and the items that are done already. The first call
-- counts. Follows retention.lua, record_budget.lua and record_states.lua.
--
-- KEYS: record, steps, store
-- ARGV: now, step, items, items that are done, jobs, jobs to publish at first, then names and values
--       of fields
-- Returns 1: noted, 0: it was noted before, -1: the run is over, -2: there is no room for it.

local f = redis.call('HMGET', KEYS[1], 'state', 'closed', 'keep_s')
if not f[3] or f[2] or is_over(f[1]) then return -1 end
local step = ARGV[2]
if redis.call('HEXISTS', KEYS[2], 'n:' .. step) == 1 then return 0 end
local bytes = 0
for i = 7, #ARGV, 2 do bytes = bytes + #ARGV[i] + #ARGV[i + 1] end
local held, tenant = counted(KEYS[3], KEYS[1])
if tenant then
  local budget = tonumber(redis.call('HGET', KEYS[2], 'budget')) -- nil: opened by an older API
  if budget and not find_room(KEYS[3], tenant, bytes, budget, ARGV[1]) then return -2 end
  count(KEYS[3], tenant, bytes)
  redis.call('HSET', KEYS[3] .. ':counted', KEYS[1], (held + bytes) .. ' ' .. tenant)
end
redis.call('HSET', KEYS[2], 'n:' .. step, ARGV[3], 'd:' .. step, ARGV[4], 'j:' .. step, ARGV[5],
  'h:' .. step, ARGV[6])
for i = 7, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
redis.call('HINCRBY', KEYS[1], 'flow_bytes', bytes)
redis.call('HINCRBY', KEYS[1], 'steps', ARGV[3])
redis.call('HINCRBY', KEYS[1], 'step', ARGV[4])
return 1
