-- Replaces the directory of keys if it has the expected version, and notes the act in the audit log.
-- KEYS: directory, audit. ARGV: expected version, new version, document, act, most acts.
if (redis.call('HGET', KEYS[1], 'version') or '') ~= ARGV[1] then
  return 0
end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'document', ARGV[3])
redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[5], '*', 'act', ARGV[4])
return 1
