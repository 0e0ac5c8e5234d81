-- Says what was read of items that end without a result. What was not read by now is not read any
-- more (token_read.lua), so that the charge is exact.
--
-- KEYS: record, streams
-- Returns for each stream: how many tokens were read, and its first chunk if it has one.

local out = {}
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'delivered', 1) end
for i = 2, #KEYS do
  local read = redis.call('HGET', KEYS[1], 'read_' .. string.match(KEYS[i], '%d+$'))
  local first = redis.call('XRANGE', KEYS[i], '-', '+', 'COUNT', 1)
  out[i - 1] = {tonumber(read or 0), first[1] and first[1][2][2] or nil}
end
return out
