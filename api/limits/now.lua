-- Redis's own clock, in unix milliseconds: instances need not agree on the time.
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
