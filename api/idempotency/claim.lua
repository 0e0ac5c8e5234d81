-- Claims the right to compute the response for a key. Follows retention.lua and now.lua.
--
-- KEYS: entry, store, leases
-- ARGV: fingerprint, claim, keep_s, lease_s
-- Returns a state ('acquired', 'in_progress', 'completed' or 'mismatch'), and the response if there is one.

local ends_of = KEYS[2] .. ':ends'
drop_expired(KEYS[2], now)
local ends = redis.call('ZSCORE', ends_of, KEYS[1])
if ends and tonumber(ends) > now then
  local f = redis.call('HMGET', KEYS[1], 'fingerprint', 'answer', 'claim')
  if f[1] ~= ARGV[1] then return {'mismatch', ''} end
  if f[2] then return {'completed', f[2]} end
  local lease = redis.call('ZSCORE', KEYS[3], f[3])
  if lease and tonumber(lease) > now then return {'in_progress', ''} end
end
drop(KEYS[2], KEYS[1])
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1], 'claim', ARGV[2])
redis.call('ZADD', ends_of, now + ARGV[3], KEYS[1])
redis.call('ZADD', KEYS[3], now + ARGV[4], ARGV[2])
return {'acquired', ''}
