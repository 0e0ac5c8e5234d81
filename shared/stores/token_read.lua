-- Reads tokens of several items, and whether their records are over. Notes in each record how many
-- tokens of the item were read at most, as what was read may be charged. Of a record that ended
-- without a result, only what was read before is there to read.
--
-- KEYS: for each: record, stream
-- ARGV: for each, the tokens that the reader has
-- Returns for each: 1 if the record is over or gone, then the chunks that end after those tokens.

local out = {}
for i = 1, #KEYS / 2 do
  local record, stream = KEYS[2 * i - 1], KEYS[2 * i]
  local field = 'read_' .. string.match(stream, '%d+$')
  local f = redis.call('HMGET', record, 'state', field, 'delivered')
  local open = f[1] == 'starting' or f[1] == 'processing'
  local read, last, newest = tonumber(f[2] or 0), '+', 0
  if f[1] ~= 'succeeded' and (f[3] or not open) then last = read .. '-0' end
  local found = {open and 0 or 1}
  for j, entry in ipairs(redis.call('XRANGE', stream, '(' .. ARGV[i] .. '-0', last)) do
    found[j + 1] = entry[2][2]
    newest = tonumber(string.match(entry[1], '^%d+'))
  end
  if open and newest > read then redis.call('HSET', record, field, newest) end
  out[i] = found
end
return out
