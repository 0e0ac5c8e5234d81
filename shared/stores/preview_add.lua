-- Adds a preview of a prediction that is being processed. The oldest one leaves a full stream.
--
-- KEYS: record, stream
-- ARGV: most previews, seconds to keep them, index, step, steps, image

if redis.call('HGET', KEYS[1], 'state') ~= 'processing' then return 0 end
redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[1], '*',
  'index', ARGV[3], 'step', ARGV[4], 'steps', ARGV[5], 'image', ARGV[6])
redis.call('EXPIRE', KEYS[2], ARGV[2])
return 1
