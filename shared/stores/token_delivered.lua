-- Says what was read of items that end without a result. What was not read by now is not read any
-- more (token_read.lua), so that the charge is exact. All of it is in the record, and stays there if
-- the prediction is deleted in the meantime (record_delete.lua).
--
-- KEYS: record
-- ARGV: items
-- Returns for each item: how many tokens were read, and what its prompt is charged by.

local out = {}
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'delivered', 1) end
for i, item in ipairs(ARGV) do
  local f = redis.call('HMGET', KEYS[1], 'read_' .. item, 'prompt_' .. item)
  out[i] = {tonumber(f[1] or 0), f[2] or ''}
end
return out
