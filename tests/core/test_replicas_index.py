"""The index of a replica is a cache of blocks that forgets the least recently used first, in little memory."""

from __future__ import annotations

from array import array
from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.replicas.index import NODE_BYTES, PrefixIndex


def chain(word: str) -> array[int]:
    """A block per letter; equal beginnings have equal links."""
    return array("Q", [hash(word[: i + 1]) & 0xFFFF_FFFF_FFFF for i in range(len(word))])


def index(*words: str, capacity: int = 100) -> PrefixIndex:
    found = PrefixIndex(capacity)
    for word in words:
        found.add(chain(word))
    return found


def matches(known: PrefixIndex, *words: str) -> list[int]:
    return [known.match(chain(word)) for word in words]


class Blocks:
    """The same, block by block: what the tree of runs must equal."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, links: array[int]) -> None:
        for link in reversed(links):
            self._order[link] = None
            self._order.move_to_end(link)
        while len(self._order) > self._capacity:
            self._order.popitem(last=False)

    def match(self, links: array[int]) -> int:
        return next((i for i, link in enumerate(links) if link not in self._order), len(links))


WORDS = st.text("ab", min_size=1, max_size=9)


@settings(deadline=None, max_examples=300)
@given(st.lists(WORDS, max_size=25), st.integers(1, 30))
def test_it_holds_what_an_lru_of_blocks_holds(words: list[str], capacity: int) -> None:
    tree, blocks = PrefixIndex(capacity), Blocks(capacity)
    for word in words:
        tree.add(chain(word))
        blocks.add(chain(word))
        # A run is used as a whole, so where a chain ends within one, its end stays longer than block by block.
        assert all(tree.match(chain(w)) >= min(blocks.match(chain(w)), len(w)) for w in words[-1:])
        assert tree.blocks <= capacity
        assert tree.size_bytes <= capacity * (8 + NODE_BYTES)
    assert all(tree.match(chain(word)) <= len(word) for word in words)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("adrc"), WORDS, st.integers(0, 9)), max_size=30))
def test_whatever_is_done_it_counts_its_blocks_and_stays_closed_under_prefixes(
    steps: list[tuple[str, str, int]],
) -> None:
    tree = PrefixIndex(20)
    for what, word, number in steps:
        match what:
            case "a":
                tree.add(chain(word))
            case "d":
                tree.drop(chain(word), number)
                assert tree.match(chain(word)) <= max(number, 0) or number >= len(word)
            case "r":
                tree.resize(number + 5)
            case "c":
                tree.drop_older(tree.used_at(chain(word)))
        everything = {w[:n] for _, w, _ in steps for n in range(1, tree.match(chain(w)) + 1)}
        assert tree.blocks >= len(everything)
        assert tree.blocks <= tree.capacity
    tree.clear()
    assert (tree.blocks, tree.size_bytes) == (0, 0)


def test_what_hangs_together_goes_from_its_end() -> None:
    known = index("abcdef", "abXYZ", capacity=9)
    assert matches(known, "abcdef", "abXYZ") == [6, 5]
    known.add(chain("Q"))  # displaces the end of the oldest
    assert matches(known, "abcdef", "abXYZ", "Q") == [5, 5, 1]
    known.add(chain("RST"))
    assert matches(known, "abcdef", "abXYZ", "RST") == [2, 5, 3]


def test_a_step_that_goes_on_costs_its_new_blocks_only() -> None:
    known = index("abc")
    for end in ("abcd", "abcdef", "abcdefg"):
        known.add(chain(end))
    assert known.size_bytes == 7 * 8 + NODE_BYTES


def test_dropping_past_a_length_takes_the_branches_behind_it() -> None:
    known = index("abcdef", "abcXY", "abZ")
    known.drop(chain("abcdef"), 2)
    assert matches(known, "abcdef", "abcXY", "abZ") == [2, 2, 3]
    known.drop(chain("qqq"), 0)
    assert known.blocks == 3


def test_dropping_what_is_older_keeps_what_was_used_since() -> None:
    known = index("old", "mid", "new")
    known.drop_older(known.used_at(chain("mid")))
    assert matches(known, "old", "mid", "new") == [0, 3, 3]


def test_the_number_of_nodes_is_bounded_too() -> None:
    known = PrefixIndex(1_000_000, nodes_max=10)
    for n in range(1_000):
        known.add(array("Q", [n]))
    assert (known.blocks, known.size_bytes) == (10, 10 * (8 + NODE_BYTES))
    assert known.match(array("Q", [999])) == 1
