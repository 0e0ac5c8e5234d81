-- Returns for how many milliseconds this Redis has counted: since it was first asked, or since it lost its
-- data. Follows now.lua.
--
-- KEYS: the time at which it began

redis.call('SET', KEYS[1], string.format('%.0f', now_ms), 'NX')
return now_ms - tonumber(redis.call('GET', KEYS[1]))
