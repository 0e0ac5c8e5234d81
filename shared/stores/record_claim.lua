-- Claims records for a worker, and creates those that are missing. Follows record_states.lua.
--
-- KEYS: records
-- ARGV: now, seconds to keep records of jobs that are not predictions
-- Returns for each record: state, attempts, earlier claims that are still open, reply, and how many
-- of those claims were alone.

local now, ttl, out = ARGV[1], ARGV[2], {}
for i, key in ipairs(KEYS) do
  local f = redis.call('HMGET', key, 'state', 'attempts', 'open', 'keep_s', 'reply', 'alone')
  if f[5] or is_over(f[1]) then
    out[i] = {f[1], tonumber(f[2] or 0), tonumber(f[3] or 0), f[5] or '', 0}
  else
    local attempts, open = tonumber(f[2] or 0) + 1, tonumber(f[3] or 0)
    redis.call('HSET', key,
      'state', 'processing', 'attempts', attempts, 'open', open + 1, 'started_at_s', now)
    if not f[4] then redis.call('EXPIRE', key, ttl) end
    out[i] = {'processing', attempts, open, '', tonumber(f[6] or 0)}
  end
end
return out
