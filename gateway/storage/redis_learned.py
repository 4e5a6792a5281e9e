"""What one process has learned of a run's prompts, for the others, so that replicas send the same bytes.

`tollhouse:{learned:<key>}:<run>` is a hash: "t" and the digest of a set of tools -> the order in which they came first, "v"
and the number of a line of the system prompt that may move (a clock, a directory, a branch, an id) -> "p" if it stands in its
place or "e" at the end of its text, its size, and the wording that this run has of it. Where a line comes otherwise, its
number goes into the set `tollhouse:{learned:<key>}:lines:<prompt>`: from then on it is volatile for everybody. Wordings that
stand in their places are in there, too. What such lines say since is in `<run>:notes`, by what was said before. But for those
lines it is hashes, no text; it lives four hours after its last word, and losing it costs that each process learns by itself.
"""

from __future__ import annotations

from gateway.core.learned import Known, ToldNote, Unknown
from gateway.storage.redis import OnRedis, RedisLine, Script, StoreLost

TIMEOUT_S = 0.02
TTL_S = 4 * 3_600
#: Fields of one run; one that changes its tools with every turn cannot be helped.
FIELDS_MAX = 256
_NOTES = b":notes"

#: KEYS: run, its requests with this prompt, prompt, notes of these requests. ARGV: time to live, most fields, digest and
#: order of the tools ("" if known), and of each line number, size and wording. Answers with the first order ("" if this was
#: it), for each line with where it stands and its wording, and with the notes. The rules are those of
#: `core.relocation.learn`.
_ASK = Script(
    """
local ttl, most = ARGV[1], tonumber(ARGV[2])

local function first(key, field, value)
  local found = redis.call('HGET', key, field)
  if not found and redis.call('HLEN', key) < most then redis.call('HSET', key, field, value) end
  redis.call('EXPIRE', key, ttl)
  return found
end

local order = ''
if ARGV[3] ~= '' then order = first(KEYS[1], 't' .. ARGV[3], ARGV[4]) or '' end
local stands = {}

local function placed(number, size, line)
  local text = number .. ' ' .. line
  if redis.call('SISMEMBER', KEYS[3], number) == 1 and redis.call('SISMEMBER', KEYS[3], text) == 0 then
    return 'e' .. size .. ' ' .. line
  end
  if redis.call('SCARD', KEYS[3]) < most then redis.call('SADD', KEYS[3], text) end
  return 'p' .. size .. ' ' .. line
end

for i = 5, #ARGV, 3 do
  local number, size, line = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local told = redis.call('HGET', KEYS[2], 'v' .. number)
  if not told then
    told = placed(number, size, line)
    first(KEYS[2], 'v' .. number, told)
  end
  local at, before, text = string.match(told, '^(.)(%d+) (.*)$')
  if text ~= line then
    if tonumber(size) > tonumber(before) then
      told = placed(number, size, line)
      redis.call('HSET', KEYS[2], 'v' .. number, told)
      redis.call('DEL', KEYS[4])
      at, text = string.sub(told, 1, 1), line
    else
      redis.call('SADD', KEYS[3], number)
    end
  end
  stands[#stands + 1] = at .. text
end
redis.call('EXPIRE', KEYS[2], ttl)
redis.call('EXPIRE', KEYS[3], ttl)
local notes = {}
if redis.call('HLEN', KEYS[4]) > 0 then
  notes = redis.call('HGETALL', KEYS[4])
  redis.call('EXPIRE', KEYS[4], ttl)
end
return {order, stands, notes}
"""
)


#: KEYS: notes of a run. ARGV: time to live, most fields, what was said before, the note. The first one told is kept.
_TELL = Script(
    """
if redis.call('HLEN', KEYS[1]) < tonumber(ARGV[2]) then redis.call('HSETNX', KEYS[1], ARGV[3], ARGV[4]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
"""
)


class RedisLearned(OnRedis):
    """`ports.Learned`. `start` before use, `close` after."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._line = RedisLine(
            url,
            (_ASK, _TELL),
            timeout_s=timeout_s,
            without="each process learns the order of tools by itself",
        )

    async def ask(self, key_id: str, unknown: Unknown) -> Known:
        of_key = _of(key_id)
        thread = of_key + unknown.thread
        keys = (of_key + unknown.run, thread, of_key + b"lines:" + unknown.prompt, thread + _NOTES)
        lines = [word for line in unknown.lines for word in line]
        try:
            order, stands, notes = await self._line.run(
                _ASK, keys, (TTL_S, FIELDS_MAX, unknown.tools, unknown.order, *lines)
            )
        except StoreLost:
            return Known()
        found = [
            (number, text[1:], text[:1] == b"e")
            for (number, _, _), text in zip(unknown.lines, stands, strict=True)
        ]
        return Known(order, tuple(found), tuple(zip(notes[::2], notes[1::2], strict=True)))

    def tell(self, key_id: str, note: ToldNote) -> None:
        """Returns at once; others can know it a moment later."""
        keys = [_of(key_id) + note.thread + _NOTES]
        self._line.tell(_TELL, keys, (TTL_S, FIELDS_MAX, note.link, note.text))


def _of(key_id: str) -> bytes:
    return b"tollhouse:{learned:%b}:" % key_id.encode()
