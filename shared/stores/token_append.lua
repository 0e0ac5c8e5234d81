-- Appends tokens to streams, each only for the worker that holds the record. A text that went on is
-- not what killed the workers before, so their claims do not count any more.
--
-- KEYS: for each: record, stream
-- ARGV: seconds to keep streams; for each: attempt, tokens before, tokens with these, chunk, and of
-- a first chunk what its item's prompt is charged by, which stays in the record (token_delivered.lua)
-- Returns for each: tokens in the stream. -1: the worker has lost the record, or it is over.

local out = {}
for i = 1, #KEYS / 2 do
  local record, stream, at = KEYS[2 * i - 1], KEYS[2 * i], 5 * i - 3
  local attempt, first, last = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local held = redis.call('HMGET', record, 'state', 'attempts', 'open')
  if held[1] ~= 'processing' or tonumber(held[2] or 0) > attempt then
    out[i] = -1
  else
    local newest, has = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1), 0
    if newest[1] then has = tonumber(string.match(newest[1][1], '^%d+')) end
    if has == first and last > first then
      redis.call('XADD', stream, last .. '-0', 'c', ARGV[at + 3])
      redis.call('EXPIRE', stream, ARGV[1])
      if tonumber(held[3] or 0) > 1 then redis.call('HSET', record, 'open', 1, 'alone', 0) end
      if first == 0 then
        redis.call('HSET', record, 'prompt_' .. string.match(stream, '%d+$'), ARGV[at + 4])
      end
      has = last
    end
    out[i] = has
  end
end
return out
