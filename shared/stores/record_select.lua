-- Selects the predictions that may match a list's filter, so that the others don't have to be read.
-- Follows record_states.lua.
--
-- KEYS: records
-- ARGV: a state, a text near the start of the document (each may be empty: all), its range in bytes
-- Returns the positions of the records that may match. Unfinished ones match every state, because
-- the reader ends those that are late.

local state, text, range, found = ARGV[1], ARGV[2], tonumber(ARGV[3]), {}
for i, key in ipairs(KEYS) do
  local is = redis.call('HGET', key, 'state')
  local may_match = is and (state == '' or is == state or not is_over(is))
  if may_match and text ~= '' then
    local document = redis.call('HGET', key, 'document')
    may_match = document and string.find(string.sub(document, 1, range), text, 1, true)
  end
  if may_match then found[#found + 1] = i end
end
return found
