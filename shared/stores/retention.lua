-- A budget of bytes for a store whose entries Redis must not evict. See shared/stores/retention.py.
--
-- A store is a name. Below it are these keys:
--   <store>:bytes            all bytes counted
--   <store>:bytes_of         the same by tenant
--   <store>:counted          bytes and tenant of each entry
--   <store>:may_go:<tenant>  entries, by the time from which they may be dropped
--   <store>:ends             entries, by the time at which they expire

local ENTRY_BYTES = 1024  -- what an entry takes in addition to its content: key, fields, index entries
local MAX_DROPPED = 1000 -- entries dropped by one call, which takes Redis some milliseconds

-- Called for each entry that is dropped. A store with more indexes replaces this function.
local function forget(store, key, tenant) end

local function count(store, tenant, bytes)
  redis.call('INCRBY', store .. ':bytes', bytes)
  if tonumber(redis.call('ZINCRBY', store .. ':bytes_of', bytes, tenant)) <= 0 then
    redis.call('ZREM', store .. ':bytes_of', tenant)
  end
end

local function counted(store, key)
  local entry = redis.call('HGET', store .. ':counted', key) or ''
  local bytes, tenant = string.match(entry, '^(%d+) (.*)$')
  return tonumber(bytes or 0), tenant
end

local function keep(store, key, tenant, bytes, may_go)
  count(store, tenant, bytes - counted(store, key))
  redis.call('HSET', store .. ':counted', key, bytes .. ' ' .. tenant)
  redis.call('ZADD', store .. ':may_go:' .. tenant, may_go, key)
end

local function drop(store, key)
  -- DEL comes first: a script whose first write takes no memory may go on if Redis is full.
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

local function oldest(store, tenant, now, most)
  return redis.call('ZRANGEBYSCORE', store .. ':may_go:' .. tenant, '-inf', now, 'LIMIT', 0, most)
end

-- Drops entries of the largest tenants until `wanted` bytes fit.
-- Returns whether they fit, and how many entries were dropped.
local function make_room(store, wanted, budget, now)
  local dropped = 0
  while tonumber(redis.call('GET', store .. ':bytes') or 0) + wanted > budget
    and dropped < MAX_DROPPED do
    local largest = redis.call('ZREVRANGE', store .. ':bytes_of', 0, 0)[1]
    local key = largest and oldest(store, largest, now, 1)[1]
    if not key then return false, dropped end
    drop(store, key)
    dropped = dropped + 1
  end
  return true, dropped
end

-- Drops the oldest entries of one tenant, if they free `wanted` bytes, and otherwise nothing.
-- Returns whether they did, and how many entries were dropped.
local function replace_own(store, tenant, wanted, now)
  local freed, own = 0, {}
  for _, key in ipairs(oldest(store, tenant, now, MAX_DROPPED)) do
    freed = freed + counted(store, key)
    table.insert(own, key)
    if freed >= wanted then
      for _, each in ipairs(own) do drop(store, each) end
      return true, #own
    end
  end
  return false, 0
end
