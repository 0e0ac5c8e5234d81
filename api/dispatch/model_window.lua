-- Publishes this instance's state of a model to the others, and returns theirs.
-- The state of an instance counts until its lease ends.
--
-- KEYS: hash of what each instance has
-- ARGV: instance, lease in milliseconds, what it has (empty: nothing any more)
-- Returns a list of what the others have.

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local fields, others = redis.call('HGETALL', KEYS[1]), {}
for place = 1, #fields, 2 do
  local ends, told = string.match(fields[place + 1], '^(%d+) (.*)$')
  if not ends or tonumber(ends) < now_ms then
    redis.call('HDEL', KEYS[1], fields[place])
  elseif fields[place] ~= ARGV[1] then
    others[#others + 1] = told
  end
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%d %s', now_ms + ARGV[2], ARGV[3]))
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return others
