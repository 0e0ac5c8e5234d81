-- Ends records. The first reply stays: a late attempt changes nothing and gets the first reply.
-- A record that a caller canceled takes only a reply that says so.
-- Follows retention.lua, record_budget.lua and record_states.lua.
--
-- KEYS: store, records
-- ARGV: now, seconds to keep records of jobs that are not predictions, then state, reply of each
-- Returns for each record: 1 if the reply is kept, state, the reply that was there before.

local now, ttl, store, out = ARGV[1], ARGV[2], KEYS[1], {}
for i = 2, #KEYS do
  local key, state, reply = KEYS[i], ARGV[2 * i - 1], ARGV[2 * i]
  local f = redis.call('HMGET', key, 'state', 'keep_s', 'reply', 'receipts', 'logs_left_out')
  local first = f[3] or f[4] -- of a deleted one, the receipts of its reply
  if first or (is_over(f[1]) and (f[1] ~= 'canceled' or state ~= 'canceled')) then
    out[i - 1] = {0, f[1], first or ''}
  else
    redis.call('HSET', key, 'state', state, 'reply', reply, 'ended_at_s', now, 'open', 0)
    if f[5] and state == 'succeeded' then redis.call('HDEL', key, 'logs', 'logs_left_out') end -- the reply has them
    if f[2] then ended(store, key, now, f[2]) else redis.call('EXPIRE', key, ttl) end
    out[i - 1] = {1, state, ''}
  end
end
return out
