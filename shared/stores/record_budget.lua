-- What the budget needs to know of predictions. Follows retention.lua.

-- A dropped prediction leaves the index of its tenant too, and a run of a flow loses its steps.
forget = function(store, key, tenant)
  local _, prefix_ends = string.find(key, 'record:', 1, true)
  redis.call('ZREM', store .. ':of:' .. tenant, string.sub(key, prefix_ends + 1))
  redis.call('DEL', key .. ':flow')
end

-- Counts a prediction that ended with what it holds now.
local function ended(store, key, now, keep_s)
  redis.call('ZADD', store .. ':ends', now + keep_s, key)
  redis.call('ZADD', store .. ':held', 'XX', now, key) -- what it reserved can be settled (holds.py)
  local _, tenant = counted(store, key)
  if not tenant then return end -- created by a release without budgets
  local held = redis.call('HSTRLEN', key, 'document') + redis.call('HSTRLEN', key, 'reply')
    + tonumber(redis.call('HGET', key, 'flow_bytes') or 0)
  keep(store, key, tenant, held + ENTRY_BYTES, now)
end

local SMALL_SHARE = 16 -- a tenant with less than this part of the budget always finds room

-- Makes room for a prediction of a tenant. Returns whether there is, and how many were dropped for it.
local function find_room(store, tenant, wanted, budget, now)
  if wanted > budget then return false, 0 end
  local has_room, dropped = make_room(store, wanted, budget, now)
  if has_room then return true, dropped end
  local all = tonumber(redis.call('GET', store .. ':bytes') or 0) + wanted
  local own = tonumber(redis.call('ZSCORE', store .. ':bytes_of', tenant) or 0) + wanted
  if own > budget / SMALL_SHARE or all > 2 * budget then
    local replaced, more = replace_own(store, tenant, wanted, now)
    return replaced, dropped + more
  end
  return true, dropped
end
