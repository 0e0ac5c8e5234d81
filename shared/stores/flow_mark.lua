-- Notes how items of a step of a flow ended. The first call for an item counts, and only while the run
-- is open. Whoever ended items of a job publishes further jobs of the step, so that about as many
-- as at first are in the topic. A repeated call gets the same jobs. Follows retention.lua and
-- record_states.lua.
--
-- KEYS: record, steps, store
-- ARGV: step, jobs in the topic, first item of the job, then index and outcome of each item
-- Returns 1 if the run is open, items of the step, those that are done, the first job to publish and the
-- one behind the last, 1 if an item was known before, 1 if the API has published the
-- first steps, then of each item: the outcome that counts ('' if it is
-- the caller's, '-' if none does).

local f = redis.call('HMGET', KEYS[1], 'state', 'closed', 'keep_s', 'published')
local is_open = f[3] and not f[2] and not is_over(f[1])
local step, window, first = ARGV[1], tonumber(ARGV[2]), 'w:' .. ARGV[3]
local out, new, bytes, repeated = {}, 0, 0, 0
for i = 4, #ARGV, 2 do
  local known = redis.call('HGET', KEYS[2], 'o:' .. ARGV[i])
  if known then
    repeated = 1
    table.insert(out, known)
  elseif is_open then
    redis.call('HSET', KEYS[2], 'o:' .. ARGV[i], ARGV[i + 1])
    new, bytes = new + 1, bytes + #ARGV[i + 1]
    table.insert(out, '')
  else
    table.insert(out, '-')
  end
end
local s = redis.call('HMGET', KEYS[2], 'n:' .. step, 'd:' .. step, 'j:' .. step, 'h:' .. step)
local items, done, jobs, high =
  tonumber(s[1] or 0), tonumber(s[2] or 0), tonumber(s[3] or 0), tonumber(s[4] or 0)
local from, to = high, high
if new > 0 then
  done = done + new
  redis.call('HSET', KEYS[2], 'd:' .. step, done)
  redis.call('HINCRBY', KEYS[1], 'step', new)
  redis.call('HINCRBY', KEYS[1], 'flow_bytes', bytes)
  local held, tenant = counted(KEYS[3], KEYS[1])
  if tenant then
    count(KEYS[3], tenant, bytes)
    redis.call('HSET', KEYS[3] .. ':counted', KEYS[1], (held + bytes) .. ' ' .. tenant)
  end
  to = math.max(high, math.min(jobs, done + window))
  redis.call('HSET', KEYS[2], 'h:' .. step, to)
  redis.call('HSET', KEYS[2], first, from .. ' ' .. to)
else
  local range = redis.call('HGET', KEYS[2], first)
  if range then from, to = string.match(range, '^(%d+) (%d+)$') end
end
return {is_open and 1 or 0, items, done, tonumber(from), tonumber(to), repeated,
  f[4] and 1 or 0, unpack(out)}
