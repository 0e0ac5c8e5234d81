-- The time that the test says, in unix milliseconds.
local now_ms = tonumber(redis.call('GET', 'test:now_ms'))
