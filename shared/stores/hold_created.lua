-- Says whether a hold was created whose creator does not know it. If not, it will not be created any
-- more: the request may come late, over a connection that was given up.
--
-- KEYS: record, the mark that the hold is void
-- ARGV: digest of the hold, lifetime of the mark in seconds
-- Returns 1 if the record was created with it. It may be settled by now, and the record deleted.

if redis.call('HGET', KEYS[1], 'hold') == ARGV[1] then return 1 end
redis.call('SET', KEYS[2], '', 'EX', ARGV[2])
return 0
