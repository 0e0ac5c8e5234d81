-- Deletes a prediction that is over. What stays for a while says only that its job is over, so that
-- a late delivery computes nothing, and what it costs: how many tokens of texts were read, for a worker
-- that has yet to say what a canceled one costs (token_delivered.lua), and the receipts of its reply.
-- Follows retention.lua, record_budget.lua and record_states.lua.
--
-- KEYS: record, store, then other keys of the prediction
-- ARGV: seconds to keep what stays, the receipts of its reply ('' if there is none), and the state, as
--       the caller read them
-- Returns 1: deleted, 0: there is none, -1: it has another state or a reply by now.

local state = redis.call('HGET', KEYS[1], 'state')
if not state then return 0 end
if state ~= ARGV[3] or not is_over(state) then return -1 end
if ARGV[2] == '' and redis.call('HEXISTS', KEYS[1], 'reply') == 1 then return -1 end
local stays, fields = {'state', 'canceled'}, redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local name = fields[i]
  if string.match(name, '^read_%d+$') or string.match(name, '^prompt_%d+$')
    or name == 'attempts' or name == 'canceled_at_s' or name == 'hold' then
    table.insert(stays, fields[i])
    table.insert(stays, fields[i + 1])
  end
end
if ARGV[2] ~= '' then
  table.insert(stays, 'receipts')
  table.insert(stays, ARGV[2])
end
drop(KEYS[2], KEYS[1])
redis.call('HSET', KEYS[1], unpack(stays))
redis.call('EXPIRE', KEYS[1], ARGV[1])
for i = 3, #KEYS do redis.call('DEL', KEYS[i]) end
return 1
