-- Returns whether an event of a webhook is to be delivered.
--
-- KEYS: done, told
-- ARGV: milliseconds in which no other event of this kind is due, 0 for no bound
-- Returns 'due', 'throttled' or 'late'.

if redis.call('EXISTS', KEYS[1]) == 1 then return 'late' end
if ARGV[1] ~= '0' and not redis.call('SET', KEYS[2], '1', 'NX', 'PX', ARGV[1]) then
  return 'throttled'
end
return 'due'
