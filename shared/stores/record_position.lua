-- Returns the position of a prediction among those of its tenant and model that no worker has taken.
-- A prediction that left is noticed here and nowhere else, so that claims cost nothing more.
--
-- KEYS: record, line, pace of the line
-- ARGV: now, deadline of the record
-- Returns the position from 1, how many left lately, and in how many seconds; nothing if it does not
-- wait. The last two are texts, since Redis cuts numbers.

local MAX_CHECKED = 256 -- predictions ahead; those behind them count without a check
local FADE_S = 30
local PACE_KEPT_S = 60

local now, before = tonumber(ARGV[1]), '(' .. ARGV[2]
if redis.call('HGET', KEYS[1], 'state') ~= 'starting' then return {} end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[1])
local gone = 0
local ahead = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', before, 'LIMIT', 0, MAX_CHECKED)
for _, each in ipairs(ahead) do
  if redis.call('HGET', each, 'state') ~= 'starting' then
    redis.call('ZREM', KEYS[2], each)
    gone = gone + 1
  end
end
local position = redis.call('ZCOUNT', KEYS[2], '-inf', before) + 1
local p = redis.call('HMGET', KEYS[3], 'looked_s', 'left', 'seconds')
local left, seconds = 0, 0
if p[1] then -- who left before the first look left at an unknown time
  local passed = math.max(0, now - tonumber(p[1]))
  local kept = math.exp(-passed / FADE_S)
  left, seconds = tonumber(p[2]) * kept + gone, tonumber(p[3]) * kept + passed
end
redis.call('HSET', KEYS[3], 'looked_s', ARGV[1], 'left', left, 'seconds', seconds)
redis.call('EXPIRE', KEYS[3], PACE_KEPT_S)
return {position, tostring(left), tostring(seconds)}
