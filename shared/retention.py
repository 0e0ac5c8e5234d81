"""What may fill a Redis: a budget in bytes for each store whose entries Redis itself must not evict.

Answers kept for keys and predictions are promised, so they have no TTL, and a full Redis evicts none of them. Without a
budget one tenant could fill it: then nobody can create a prediction or use a key, and the cache is empty.

FUNCTIONS go before the scripts of such a store. They count what its entries take, by tenant. Where there is no room,
the oldest entry that may go goes, of the tenant that takes most: nobody loses anything to a tenant that sends much.

A store has these keys below its name: `<name>:bytes`, all that is counted; `<name>:bytes_of`, the same by tenant;
`<name>:counted`, bytes and tenant of each entry; `<name>:may_go:<tenant>`, entries by the time from which they may go;
`<name>:ends`, entries by the time they expire. What is counted stands beside the entries and not in them, so whoever
removes an entry without knowing of this (a release from before it, an operator) leaves a count that goes in its turn.

A store's script defines `forget(store, key, tenant)` before FUNCTIONS, for what else it has of an entry.
"""

from __future__ import annotations

BUDGET_BYTES = 64 * 1024 * 1024
"""A quarter of the local stack's Redis: two stores and what Redis needs beside them leave a part to the cache."""

ENTRY_BYTES = 1024
"""What an entry takes in Redis besides what it holds: its key, its fields, its places in the indexes."""

MOST_DROPPED = 1000
"""Entries dropped by one call, which takes Redis some milliseconds: a budget that was lowered is reached bit by bit."""

FUNCTIONS = (
    """
local function count(store, tenant, bytes)
  redis.call('INCRBY', store .. ':bytes', bytes)
  if tonumber(redis.call('ZINCRBY', store .. ':bytes_of', bytes, tenant)) <= 0 then
    redis.call('ZREM', store .. ':bytes_of', tenant)
  end
end
local function counted(store, key)
  local bytes, tenant = string.match(redis.call('HGET', store .. ':counted', key) or '', '^(%d+) (.*)$')
  return tonumber(bytes or 0), tenant
end
local function keep(store, key, tenant, bytes, may_go)
  count(store, tenant, bytes - counted(store, key))
  redis.call('HSET', store .. ':counted', key, bytes .. ' ' .. tenant)
  redis.call('ZADD', store .. ':may_go:' .. tenant, may_go, key)
end
local function drop(store, key)
  -- First, since a script whose first write takes no memory may go on where Redis is full.
  redis.call('DEL', key)
  local bytes, tenant = counted(store, key)
  if tenant then
    count(store, tenant, -bytes)
    redis.call('HDEL', store .. ':counted', key)
    redis.call('ZREM', store .. ':may_go:' .. tenant, key)
    forget(store, key, tenant)
  end
  redis.call('ZREM', store .. ':ends', key)
end
local function drop_expired(store, now)
  for _, key in ipairs(redis.call('ZRANGEBYSCORE', store .. ':ends', '-inf', now, 'LIMIT', 0, 10)) do
    drop(store, key)
  end
end
"""
    + f"""
local function oldest(store, tenant, now, most)
  return redis.call('ZRANGEBYSCORE', store .. ':may_go:' .. tenant, '-inf', now, 'LIMIT', 0, most)
end
local function make_room(store, wanted, budget, now)
  local dropped = 0
  while tonumber(redis.call('GET', store .. ':bytes') or 0) + wanted > budget and dropped < {MOST_DROPPED} do
    local largest = redis.call('ZREVRANGE', store .. ':bytes_of', 0, 0)[1]
    local key = largest and oldest(store, largest, now, 1)[1]
    if not key then return false, dropped end
    drop(store, key)
    dropped = dropped + 1
  end
  return true, dropped
end
local function replace_own(store, tenant, wanted, now)
  local freed, own = 0, {{}}
  for _, key in ipairs(oldest(store, tenant, now, {MOST_DROPPED})) do
    freed = freed + counted(store, key)
    table.insert(own, key)
    if freed >= wanted then
      for _, each in ipairs(own) do drop(store, each) end
      return true, #own
    end
  end
  return false, 0
end
"""
)
"""`make_room` drops of the largest tenants until `wanted` bytes fit, `replace_own` as much of one tenant as it wants.

Both return whether there is room now, and how many entries were dropped.
"""
