-- Lets all claims of a record go: another revision of its model is to do the job.
-- Follows record_states.lua.
--
-- KEYS: record

local state = redis.call('HGET', KEYS[1], 'state')
if not state or is_over(state) then return 0 end
redis.call('HSET', KEYS[1], 'open', 0, 'alone', 0, 'state', 'starting')
return 1
