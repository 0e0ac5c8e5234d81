"""The transitions of a record, as scripts that Redis runs whole: no other command comes between their reads and writes.

A record is a hash. Fields: `state` (starting, processing, succeeded, failed or canceled), `attempts` (claims so far),
`open` (claims that neither ended the record nor were let go), `reply` (the encoded ReplyBody of whoever ended it),
`step` and `steps`, `*_at_s` (unix seconds), and of a prediction `document`, `keep_s` and `published`. All predictions
together have a budget of bytes (shared/retention.py).

Scripts take several records where calls come in numbers: a script for 100 records costs little more than for one.
"""

from __future__ import annotations

from shared.retention import ENTRY_BYTES, FUNCTIONS

SMALL_SHARE = 16
"""A tenant whose predictions take less than this part of the budget is let in where others have filled it."""

ABANDONED_S = 120
"""After its deadline a prediction that nobody ended may go: nobody will, and who reads it is told that it failed."""

_IS_OVER = """
local function is_over(state)
  return state == 'succeeded' or state == 'failed' or state == 'canceled'
end
"""

_BUDGET = (
    """
local function forget(store, key, tenant)
  local _, prefix_ends = string.find(key, 'record:', 1, true)
  redis.call('ZREM', store .. ':of:' .. tenant, string.sub(key, prefix_ends + 1))
end
"""
    + FUNCTIONS
)

CREATE = (
    _BUDGET
    + f"""
local store, now, deadline, tenant, id, document = KEYS[2], ARGV[1], ARGV[2], ARGV[4], ARGV[5], ARGV[6]
local wanted, budget = #document + ARGV[8] + {ENTRY_BYTES}, tonumber(ARGV[9])
drop_expired(store, now)
if redis.call('EXISTS', KEYS[1]) == 1 then return {{0, 0}} end
if wanted > budget then return {{-1, 0}} end
local has_room, dropped = make_room(store, wanted, budget, now)
if not has_room then
  local all = tonumber(redis.call('GET', store .. ':bytes') or 0) + wanted
  local own = tonumber(redis.call('ZSCORE', store .. ':bytes_of', tenant) or 0) + wanted
  if own > budget / {SMALL_SHARE} or all > 2 * budget then
    local replaced, more = replace_own(store, tenant, wanted, now)
    dropped = dropped + more
    if not replaced then return {{-1, dropped}} end
  end
end
redis.call('HSET', KEYS[1], 'state', 'starting', 'created_at_s', now, 'keep_s', ARGV[3], 'document', document)
keep(store, KEYS[1], tenant, wanted, deadline + {ABANDONED_S})
redis.call('ZADD', store .. ':ends', deadline + ARGV[3], KEYS[1])
redis.call('ZADD', KEYS[3], now, id)
redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -tonumber(ARGV[7]) - 1)
return {{1, dropped}}
"""
)
"""KEYS: record, store, index of the tenant. ARGV: now, deadline, keep_s, tenant, id, document, most in the tenant's
index, bytes that its reply may take, budget of the store. Returns 1: new, 0: there already, -1: refused; and how many
others were dropped for it.

What has expired goes here, a few with each new one, and not by a TTL: Redis evicts what has a TTL when it is full
(volatile-lru), and a prediction is promised.
"""

_END = (
    _BUDGET
    + f"""
local function ended(store, key, now, keep_s)
  redis.call('ZADD', store .. ':ends', now + keep_s, key)
  local _, tenant = counted(store, key)
  if not tenant then return end
  local bytes = redis.call('HSTRLEN', key, 'document') + redis.call('HSTRLEN', key, 'reply') + {ENTRY_BYTES}
  keep(store, key, tenant, bytes, now)
end
"""
)
"""A prediction that a release from before the budget created is not counted."""

CLAIM = (
    _IS_OVER
    + """
local now, ttl, out = ARGV[1], ARGV[2], {}
for i, key in ipairs(KEYS) do
  local f = redis.call('HMGET', key, 'state', 'attempts', 'open', 'keep_s', 'reply')
  if f[5] or is_over(f[1]) then
    out[i] = {f[1], tonumber(f[2] or 0), tonumber(f[3] or 0), f[5] or ''}
  else
    local attempts, open = tonumber(f[2] or 0) + 1, tonumber(f[3] or 0)
    redis.call('HSET', key, 'state', 'processing', 'attempts', attempts, 'open', open + 1, 'started_at_s', now)
    if not f[4] then redis.call('EXPIRE', key, ttl) end
    out[i] = {'processing', attempts, open, ''}
  end
end
return out
"""
)
"""KEYS: records. ARGV: now, seconds to keep those that are no predictions. A record that is missing is made."""

FINISH = (
    _IS_OVER
    + _END
    + """
local now, ttl, store, out = ARGV[1], ARGV[2], KEYS[1], {}
for i = 2, #KEYS do
  local key, state, reply = KEYS[i], ARGV[2 * i - 1], ARGV[2 * i]
  local f = redis.call('HMGET', key, 'state', 'keep_s', 'reply')
  if f[3] or (is_over(f[1]) and f[1] ~= 'canceled') then
    out[i - 1] = {0, f[1], f[3] or ''}
  else
    if f[1] == 'canceled' then state = 'canceled' end
    redis.call('HSET', key, 'state', state, 'reply', reply, 'ended_at_s', now, 'open', 0)
    if f[2] then ended(store, key, now, f[2]) else redis.call('EXPIRE', key, ttl) end
    out[i - 1] = {1, state, ''}
  end
end
return out
"""
)
"""KEYS: store, records. ARGV: now, seconds to keep those that are no predictions, then state, reply of each.

The first reply stays: a late attempt changes nothing, and learns what was answered.
"""

RELEASE = (
    _IS_OVER
    + """
local f = redis.call('HMGET', KEYS[1], 'state', 'open')
if not f[1] or is_over(f[1]) then return 0 end
local open = math.max(0, tonumber(f[2] or 0) - 1)
redis.call('HSET', KEYS[1], 'open', open)
if open == 0 then redis.call('HSET', KEYS[1], 'state', 'starting') end
return 1
"""
)
"""KEYS: record. A claim is let go by a worker that lives, so that nobody suspects the job of having killed it."""

CANCEL = (
    _IS_OVER
    + _END
    + """
local f = redis.call('HMGET', KEYS[1], 'state', 'keep_s')
if is_over(f[1]) then return f[1] end
redis.call('HSET', KEYS[1], 'state', 'canceled', 'canceled_at_s', ARGV[1])
if f[2] then ended(KEYS[2], KEYS[1], ARGV[1], f[2]) else redis.call('EXPIRE', KEYS[1], ARGV[2]) end
redis.call('PUBLISH', ARGV[3], ARGV[4])
return 'canceled'
"""
)
"""KEYS: record, store. ARGV: now, seconds to keep what is no prediction, channel, id.

A job that no worker has claimed yet gets its record here, so that whoever claims it learns of the end.
"""

PROGRESS = """
if redis.call('HGET', KEYS[1], 'state') ~= 'processing' then return 0 end
redis.call('HSET', KEYS[1], 'step', ARGV[1], 'steps', ARGV[2])
return 1
"""
"""KEYS: record. ARGV: step, steps."""

PUBLISHED = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'published', 1)
return 1
"""
"""KEYS: record. The broker has its job."""

READ = """
return redis.call('HGETALL', KEYS[1])
"""
"""KEYS: record."""

LATEST = """
return redis.call('ZREVRANGEBYSCORE', KEYS[1], '(' .. ARGV[1], '-inf', 'LIMIT', 0, ARGV[2])
"""
"""KEYS: index of the tenant. ARGV: created before (or `+inf` with a bracket less), how many."""
