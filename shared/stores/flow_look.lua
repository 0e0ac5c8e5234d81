-- Says whether items of runs of flows are still to be computed, and that a run has begun.
-- Follows record_states.lua.
--
-- KEYS: record and steps of each job
-- ARGV: now, then for each job: its items, and the index of each
-- Returns for each job: 1 if its run is open, 1 if that begins now, how many of its items are done.

local out, at = {}, 2
for i = 1, #KEYS, 2 do
  local f = redis.call('HMGET', KEYS[i], 'state', 'closed', 'keep_s')
  local is_open, begins, done = f[3] and not f[2] and not is_over(f[1]), 0, 0
  for item = at + 1, at + ARGV[at] do
    done = done + redis.call('HEXISTS', KEYS[i + 1], 'o:' .. ARGV[item])
  end
  at = at + ARGV[at] + 1
  if is_open and f[1] == 'starting' then
    redis.call('HSET', KEYS[i], 'state', 'processing', 'attempts', 1, 'started_at_s', ARGV[1])
    begins = 1
  end
  out[#out + 1] = {is_open and 1 or 0, begins, done}
end
return out
