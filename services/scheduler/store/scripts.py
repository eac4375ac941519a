"""The Lua scripts that change and read one scheduler group's state. They run on Redis 6.2 and later, and on Valkey.

Keys, all with one hash tag: KEYS[1] is the group's hash `meta`. Scripts of the journal have in KEYS[2..4] log, requests and pages of
side a, in KEYS[5..7] those of side b: one side is complete and is what readers see; a rewrite fills the other. Scripts
of the lease have in KEYS[2] the key that expires when its holder does not renew it.

Fields of `meta`: `epoch` and `instance` (who leads), `format` (of everything here, written with the epoch), `side` (a or b, absent
before any generation is complete), `generation` and `counter` (of the complete side), `last` (its last record), `begun_generation` and
`begun_counter` (a rewrite under way).

Numbers are decimal strings below 2^53; ids, digests and values are bytes that no script looks into. A script
decides everything before its first write, so a refused one (full, read-only) has done nothing. A full server refuses a script at its
first write if that needs memory, and lets the rest pass if it does not: scripts that must work then begin with one that needs none.

Answers are lists: `ok` and the last record; `gap` and the last record; `older` with the stored epoch and instance; `format` and the one
found, where it is not ours; `refused` and why.
"""

from services.scheduler.store.port import JOURNAL_FORMAT, UNNUMBERED_FORMAT

_META = f"""
local META = redis.call('HMGET', KEYS[1], 'epoch', 'instance', 'side', 'generation', 'counter', 'last',
  'begun_generation', 'begun_counter', 'format')
local EPOCH, INSTANCE = META[1] or '0', META[2] or ''
local SIDE, LAST = META[3], META[6] or '0'
if META[1] and META[9] ~= '{JOURNAL_FORMAT}' then return {{'format', META[9] or '{UNNUMBERED_FORMAT}'}} end
"""

_FENCE = """
local epoch, instance = ARGV[1], ARGV[2]
if tonumber(EPOCH) > tonumber(epoch) or (EPOCH == epoch and INSTANCE ~= instance) then
  return {'older', EPOCH, INSTANCE}
end
"""

_STORE_EPOCH = f"""
local function store_epoch(epoch, instance)
  redis.call('HSET', KEYS[1], 'epoch', epoch, 'instance', instance, 'format', '{JOURNAL_FORMAT}')
end
"""

_PRELUDE = (
    _META
    + _FENCE
    + """
local COMPLETE, BEGUN = (META[4] or '0') .. '.' .. (META[5] or '0'), (META[7] or '0') .. '.' .. (META[8] or '0')
local function keys_of(side)
  local first = side == 'a' and 2 or 5
  return KEYS[first], KEYS[first + 1], KEYS[first + 2]
end
local function other(side) return side == 'a' and 'b' or 'a' end
-- Run `command key` over ARGV[from .. from + count - 1], an even number at a time: Lua's stack holds some 8000 values.
local function each(command, key, from, count)
  local stop = from + count - 1
  for i = from, stop, 4000 do redis.call(command, key, unpack(ARGV, i, math.min(i + 3999, stop))) end
end
"""
)

APPEND = (
    _PRELUDE
    + """
-- ARGV: epoch, instance, generation, counter, first record, log_from, then four lists, each after its length:
-- log entries, request fields and values, request fields to delete, page fields and values
local first, log_from, entries = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local last = tonumber(LAST)
if EPOCH ~= epoch or not SIDE or COMPLETE ~= ARGV[3] .. '.' .. ARGV[4] or first > last + 1 then return {'gap', LAST} end
local new_last = first + entries - 1
if new_last <= last then return {'ok', LAST} end
local log, requests, blocks = keys_of(SIDE)
local known = last + 1 - first
each('RPUSH', log, 8 + known, entries - known)
local drop = log_from - (new_last - redis.call('LLEN', log) + 1)
if drop > 0 then redis.call('LTRIM', log, drop, -1) end
local at = 8 + entries
for _, list in ipairs({{'HSET', requests}, {'HDEL', requests}, {'HSET', blocks}}) do
  local count = tonumber(ARGV[at])
  each(list[1], list[2], at + 1, count)
  at = at + 1 + count
end
redis.call('HSET', KEYS[1], 'last', new_last)
return {'ok', tostring(new_last)}
"""
)

BEGIN = (
    _PRELUDE
    + _STORE_EPOCH
    + """
-- ARGV: epoch, instance, generation, counter
local generation, counter = tonumber(ARGV[3]), tonumber(ARGV[4])
local function not_above(number, count)
  number, count = tonumber(number or '0'), tonumber(count or '0')
  return generation < number or (generation == number and counter <= count)
end
if not_above(META[4], META[5]) or not_above(META[7], META[8]) then
  return {'refused', 'generation ' .. ARGV[3] .. '.' .. ARGV[4] .. ' is not above ' .. COMPLETE .. ' and ' .. BEGUN}
end
redis.call('UNLINK', keys_of(other(SIDE)))  -- first: what an earlier attempt left may be what fills the server
store_epoch(epoch, instance)
redis.call('HSET', KEYS[1], 'begun_generation', ARGV[3], 'begun_counter', ARGV[4])
return {'ok', LAST}
"""
)

CHUNK = (
    _PRELUDE
    + """
-- ARGV: epoch, instance, generation, counter, then two lists, each after its length: request fields and values, page fields and values
if EPOCH ~= epoch or BEGUN ~= ARGV[3] .. '.' .. ARGV[4] then
  return {'refused', 'generation ' .. ARGV[3] .. '.' .. ARGV[4] .. ' is not begun'}
end
local _, requests, blocks = keys_of(other(SIDE))
local count = tonumber(ARGV[5])
each('HSET', requests, 6, count)
each('HSET', blocks, 7 + count, tonumber(ARGV[6 + count]))
return {'ok', LAST}
"""
)

END = (
    _PRELUDE
    + """
-- ARGV: epoch, instance, generation, counter, last record
if EPOCH ~= epoch or BEGUN ~= ARGV[3] .. '.' .. ARGV[4] then
  return {'refused', 'generation ' .. ARGV[3] .. '.' .. ARGV[4] .. ' is not begun'}
end
redis.call('HDEL', KEYS[1], 'begun_generation', 'begun_counter')  -- first, so that a full server accepts what gives it room
redis.call('HSET', KEYS[1], 'side', other(SIDE), 'generation', ARGV[3], 'counter', ARGV[4], 'last', ARGV[5])
if SIDE then redis.call('UNLINK', keys_of(SIDE)) end
return {'ok', ARGV[5]}
"""
)

READ = (
    _PRELUDE
    + """
-- ARGV: epoch, instance. Answers `complete`, side, generation, counter, last, or `empty`.
if not SIDE then return {'empty'} end
return {'complete', SIDE, META[4], META[5], LAST}
"""
)

LOOK = (
    _META
    + """
-- Answers `lease`, epoch, instance, whether it is held, whether any generation is complete.
return {'lease', EPOCH, INSTANCE, redis.call('EXISTS', KEYS[2]), SIDE and 1 or 0}
"""
)

_RUN_LEASE = """
-- PEXPIRE first, also where there is nothing to prolong: a full server lets the rest pass then.
local function run_lease(epoch, ms)
  if redis.call('PEXPIRE', KEYS[2], ms) == 0 then redis.call('SET', KEYS[2], epoch, 'PX', ms) end
end
"""

TAKE = (
    _META
    + _STORE_EPOCH
    + _RUN_LEASE
    + """
-- ARGV: expected epoch and instance, new epoch and instance, milliseconds. One that has been carried out is carried out again.
if not (EPOCH == ARGV[1] and INSTANCE == ARGV[2]) and not (EPOCH == ARGV[3] and INSTANCE == ARGV[4]) then
  return {'moved', EPOCH, INSTANCE}
end
run_lease(ARGV[3], ARGV[5])
store_epoch(ARGV[3], ARGV[4])
return {'taken'}
"""
)

RENEW = (
    _META
    + _FENCE
    + _STORE_EPOCH
    + _RUN_LEASE
    + """
-- ARGV: epoch, instance, milliseconds
run_lease(epoch, ARGV[3])
if EPOCH ~= epoch then store_epoch(epoch, instance) end
return {'renewed'}
"""
)

RELEASE = (
    _META
    + _FENCE
    + """
-- ARGV: epoch, instance
if EPOCH == epoch then redis.call('DEL', KEYS[2]) end
return {'released'}
"""
)
