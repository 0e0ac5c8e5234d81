-- Takes due holds, with what their records say. Others leave them alone for a while.
--
-- KEYS: holds, times at which they are due
-- ARGV: now, most of them, seconds until others may take them
-- Returns for each: the key of its record, the hold, and fields of the record by name.

local FIELDS = {'state', 'attempts', 'canceled_at_s', 'reply', 'receipts'}

local out = {}
local due = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, record in ipairs(due) do
  local hold = redis.call('HGET', KEYS[1], record)
  if hold then
    redis.call('ZADD', KEYS[2], ARGV[1] + ARGV[3], record)
    local values, fields = redis.call('HMGET', record, unpack(FIELDS)), {}
    for i, name in ipairs(FIELDS) do
      if values[i] then
        table.insert(fields, name)
        table.insert(fields, values[i])
      end
    end
    table.insert(out, {record, hold, fields})
  else
    redis.call('ZREM', KEYS[2], record)
  end
end
return out
