-- Notes when keys were last used. Several instances note the same keys: the latest time stays.
-- KEYS: uses. ARGV: most entries, then id and time of each key.
for i = 2, #ARGV, 2 do
  local noted = tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or '0')
  if tonumber(ARGV[i + 1]) > noted then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
-- Keys that no longer exist stay noted. At the bound all are forgotten, and come back with use.
if redis.call('HLEN', KEYS[1]) > tonumber(ARGV[1]) then
  redis.call('DEL', KEYS[1])
end
return 1
