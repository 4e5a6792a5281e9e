"""What one process has learned of a run's prompts, for the others, so that replicas send the same bytes.

`tollhouse:{learned:<key>}:<run>` is a hash: "t" and the digest of a set of tools -> the order in which they came first, "l"
and the number of a line of the system prompt that may move (a clock, a directory, a branch, an id) -> its size and the
wording that stands in its place, "" where this run leaves it out. Where a line comes otherwise, its number goes into the set
`tollhouse:{learned:<key>}:lines:<prompt>`: from then on it is volatile for everybody. But for those lines it is hashes, no
text; it lives four hours after its last word, and losing it costs that each process learns by itself.
"""

from __future__ import annotations

from gateway.core.learned import Unknown
from gateway.storage.redis import RedisLine, Script, StoreLost

TIMEOUT_S = 0.02
TTL_S = 4 * 3_600
#: Fields of one run; one that changes its tools with every turn cannot be helped.
FIELDS_MAX = 256

#: KEYS: run, its requests with this prompt, prompt. ARGV: time to live, most fields, digest and order of the tools ("" if
#: known), and of each line number, size and wording. Answers with the first order ("" if this was it), and for each line with
#: what stands in its place. The rules are those of `core.relocation.learn`.
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
for i = 5, #ARGV, 3 do
  local field, size, line = 'w' .. ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local out = redis.call('SISMEMBER', KEYS[3], ARGV[i]) == 1
  local told = first(KEYS[2], field, out and '' or size .. ' ' .. line)
  if told == false then told = out and '' or size .. ' ' .. line end
  local before, text = string.match(told, '^(%d+) (.*)$')
  if text and text ~= line then
    if tonumber(size) > tonumber(before) then
      redis.call('HSET', KEYS[2], field, size .. ' ' .. line)
      text = line
    else
      redis.call('SADD', KEYS[3], ARGV[i])
    end
  end
  stands[#stands + 1] = text or ''
end
redis.call('EXPIRE', KEYS[3], ttl)
return {order, stands}
"""
)


class RedisLearned:
    """`ports.Learned`. `start` before use, `close` after."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._line = RedisLine(
            url, (_ASK,), timeout_s=timeout_s, without="each process learns the order of tools by itself"
        )

    async def start(self) -> None:
        """Does not wait for a Redis that is down."""
        await self._line.start()

    async def close(self) -> None:
        await self._line.close()

    async def ask(self, key_id: str, unknown: Unknown) -> tuple[bytes, tuple[tuple[int, bytes | None], ...]]:
        of_key = b"tollhouse:{learned:%b}:" % key_id.encode()
        keys = (of_key + unknown.run, of_key + unknown.thread, of_key + b"lines:" + unknown.prompt)
        lines = [word for line in unknown.lines for word in line]
        try:
            order, stands = await self._line.run(
                _ASK, keys, (TTL_S, FIELDS_MAX, unknown.tools, unknown.order, *lines)
            )
        except StoreLost:
            return b"", ()
        return order, tuple(
            (number, text or None) for (number, _, _), text in zip(unknown.lines, stands, strict=True)
        )
