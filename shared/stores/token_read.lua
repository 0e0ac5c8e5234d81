-- Reads tokens of several items, and whether their records are over.
--
-- KEYS: for each: record, stream
-- ARGV: for each, the tokens that the reader has
-- Returns for each: 1 if the record is over or gone, then the chunks that end after those tokens.

local out = {}
for i = 1, #KEYS / 2 do
  local state = redis.call('HGET', KEYS[2 * i - 1], 'state')
  local found = {(state == 'starting' or state == 'processing') and 0 or 1}
  for j, entry in ipairs(redis.call('XRANGE', KEYS[2 * i], '(' .. ARGV[i] .. '-0', '+')) do
    found[j + 1] = entry[2][2]
  end
  out[i] = found
end
return out
