-- Redis's own clock, in unix seconds: instances need not agree on the time.
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
