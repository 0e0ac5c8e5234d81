-- Redis's own clock, and by how much the test is ahead of it, in unix milliseconds.
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  + tonumber(redis.call('GET', 'test:ahead_ms') or 0)
