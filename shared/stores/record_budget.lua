-- What the budget needs to know of predictions. Follows retention.lua.

-- A dropped prediction leaves the index of its tenant too.
forget = function(store, key, tenant)
  local _, prefix_ends = string.find(key, 'record:', 1, true)
  redis.call('ZREM', store .. ':of:' .. tenant, string.sub(key, prefix_ends + 1))
end

-- Counts a prediction that ended with what it holds now.
local function ended(store, key, now, keep_s)
  redis.call('ZADD', store .. ':ends', now + keep_s, key)
  redis.call('ZADD', store .. ':held', 'XX', now, key) -- what it reserved can be settled (holds.py)
  local _, tenant = counted(store, key)
  if not tenant then return end -- created by a release without budgets
  local held = redis.call('HSTRLEN', key, 'document') + redis.call('HSTRLEN', key, 'reply')
  keep(store, key, tenant, held + ENTRY_BYTES, now)
end
