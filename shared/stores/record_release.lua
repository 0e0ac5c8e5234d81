-- Releases claims, so that the jobs do not count as ones that killed their worker.
-- Follows record_states.lua.
--
-- KEYS: records
-- ARGV: for each: claims to release (0 or 1), how many of them are alone, 1 if the job goes back to
-- the broker

for i, key in ipairs(KEYS) do
  local f = redis.call('HMGET', key, 'state', 'open', 'alone')
  if f[1] and not is_over(f[1]) then
    local open = math.max(0, tonumber(f[2] or 0) - ARGV[3 * i - 2])
    redis.call('HSET', key,
      'open', open, 'alone', math.max(0, tonumber(f[3] or 0) - ARGV[3 * i - 1]))
    if open == 0 and ARGV[3 * i] == '1' then redis.call('HSET', key, 'state', 'starting') end
  end
end
return 1
