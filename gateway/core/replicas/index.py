"""What one replica's prefix cache holds, as far as its answers let us know: a radix tree of links, least recently used out.

A node is a run of links without a branch, so an agent's history is one node behind that of its system prompt, and a
step extends it in place: 8 bytes a block, a handful of nodes per lineage. Because a link stands for all before it, a
run is compared by its last link alone.

Nodes are ordered by use, and using a chain uses its last node first and its first node last. So whatever is oldest
has nothing behind it, and is shortened from its end: what is left is always closed under prefixes, as it is in vLLM,
which frees a request's last block first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

#: A node without its links: object, dictionary of branches, place in the order.
NODE_BYTES = 420
NODES_MAX = 4_096


class _Node:
    __slots__ = ("branches", "last", "links", "parent", "used")

    def __init__(self, links: array[int], parent: _Node | None) -> None:
        self.links = links
        self.last = links[-1] if links else 0
        self.parent = parent
        self.branches: dict[int, _Node] = {}  # by first link
        self.used = 0


class PrefixIndex:
    """Chains that a replica has computed. `capacity` is in blocks; it and the number of nodes bound the memory."""

    def __init__(self, capacity: int, nodes_max: int = NODES_MAX) -> None:
        self._nodes_max = nodes_max
        self._capacity = max(1, capacity)
        #: with so many blocks, what comes displaces something, or soon will
        self.pressed_from = self._capacity * 0.9
        self._clock = 0
        self._root = _Node(array("Q"), None)
        self._order: OrderedDict[_Node, None] = OrderedDict()  # the least recently used first
        self.blocks = 0

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def size_bytes(self) -> int:
        return self.blocks * 8 + len(self._order) * NODE_BYTES

    def resize(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self.pressed_from = self._capacity * 0.9
        self._evict()

    def clear(self) -> None:
        self._root.branches.clear()
        self._order.clear()
        self.blocks = 0

    def match(self, links: array[int]) -> int:
        """How many leading links of a chain are here."""
        node, at, size = self._root, 0, len(links)
        while at < size:
            child = node.branches.get(links[at])
            if child is None:
                break
            end = at + len(child.links)
            if end > size or links[end - 1] != child.last:
                return at + _common(child.links, links, at)
            node, at = child, end
        return at

    def used_at(self, links: array[int]) -> int:
        """When the deepest known node of a chain was last used, in this index's own count of uses; 0 = not here."""
        node, at = self._root, 0
        while at < len(links) and (child := node.branches.get(links[at])) is not None:
            node, at = child, at + len(child.links)
        return node.used

    def add(self, links: array[int]) -> None:
        """The replica has computed this chain, or used it again."""
        if not links:
            return
        node, at, size = self._root, 0, len(links)
        while at < size:
            child = node.branches.get(links[at])
            if child is None:
                node = self._append(node, links[at:])
                break
            end = at + len(child.links)
            if end > size or links[end - 1] != child.last:
                same = _common(child.links, links, at)
                if same < len(child.links):
                    child = self._split(child, same)
                end = at + same
            node, at = child, end
        self._use(node)
        self._evict()

    def drop(self, links: array[int], kept: int) -> None:
        """Forget what begins with this chain's first `kept` + 1 links: the replica no longer has it."""
        node, at = self._root, 0
        while at <= kept < len(links):
            child = node.branches.get(links[at])
            if child is None:
                return
            same = _common(child.links, links, at)
            if at + same > kept:
                if kept > at:
                    child = next(iter(self._split(child, kept - at).branches.values()))
                self._remove(child)
                return
            if same < len(child.links):
                return
            node, at = child, at + same

    def drop_older(self, used: int) -> None:
        """Forget what was last used before `used`: who lost something lost first what was older."""
        while self._order and (node := next(iter(self._order))).used < used:
            self._remove(node)

    # --- nodes -------------------------------------------------------------------------------------------

    def _append(self, node: _Node, links: array[int]) -> _Node:
        self.blocks += len(links)
        if node is not self._root and not node.branches:
            node.links.extend(links)
            node.last = links[-1]
            return node
        child = node.branches[links[0]] = _Node(links, node)
        return child

    def _split(self, node: _Node, at: int) -> _Node:
        """Put a node of the first `at` links before the others, and return it."""
        parent = node.parent
        assert parent is not None, "the root has no links to split"
        head = _Node(node.links[:at], parent)
        parent.branches[head.links[0]] = head
        head.used = node.used
        node.links, node.parent = node.links[at:], head
        head.branches[node.links[0]] = node
        # It counts as used now, since there is no inserting in the middle of the order: whoever splits also uses it,
        # except in `drop`.
        up: _Node | None = head
        while up is not None and up is not self._root:
            self._order[up] = None
            self._order.move_to_end(up)
            up = up.parent
        return head

    def _use(self, node: _Node) -> None:
        self._clock += 1
        up: _Node | None = node
        while up is not None and up is not self._root:
            up.used = self._clock
            self._order[up] = None
            self._order.move_to_end(up)
            up = up.parent

    def _evict(self) -> None:
        while self.blocks > self._capacity or len(self._order) > self._nodes_max:
            node = next(iter(self._order))
            over = self.blocks - self._capacity
            if 0 < over < len(node.links) and len(self._order) <= self._nodes_max:
                del node.links[-over:]
                node.last = node.links[-1]
                self.blocks -= over
            else:
                self._remove(node)

    def _remove(self, node: _Node) -> None:
        """With everything behind it."""
        parent = node.parent
        assert parent is not None, "the root stays"
        del parent.branches[node.links[0]]
        gone = [node]
        while gone:
            node = gone.pop()
            self.blocks -= len(node.links)
            del self._order[node]
            gone.extend(node.branches.values())


def _common(run: array[int], links: array[int], at: int) -> int:
    """How many leading links of `run` are those of `links` from `at` on; bisection, for they nest."""
    low, high = 0, min(len(run), len(links) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == links[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
