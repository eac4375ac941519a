"""Finds the first stop string in a text that grows token by token, holding back only what could still become one.

The rule, a function of the tokens alone: the output ends at the first token whose text completes a stop string. If it completes several,
the one that starts first wins; of those that start together, the shortest. Text is held back only as long as it is a proper prefix of
a stop string, so the head of a stop string never leaks and nothing else waits.
"""

import re
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was completed. `text` is what may still be shown before it."""

    stop_string: str
    text: str


class StopStrings:
    """The stop strings of one request as one automaton (Aho, Corasick 1975). Immutable.

    A node stands for a prefix of some stop string. In a node: `_next` is where each character leads, `_fallback` the node of the longest
    proper suffix that is a prefix too, `_match` the longest stop string that ends here. Building and scanning take linear time.
    """

    __slots__ = ("_fallback", "_first_chars", "_match", "_next", "depth")

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        assert all(stop_strings), "a stop string is not empty"
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._match = [""]
        self.depth = [0]
        for stop_string in stop_strings:
            self._insert(stop_string)
        self._link()
        first_chars = "".join(map(re.escape, self._next[0]))
        self._first_chars = re.compile(f"[{first_chars}]") if first_chars else None

    def _insert(self, stop_string: str) -> None:
        node = 0
        for char in stop_string:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._match.append("")
                self.depth.append(self.depth[node] + 1)
            node = self._next[node][char]
        self._match[node] = stop_string

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                self._fallback[child] = self.step(self._fallback[node], char)
                self._match[child] = self._match[child] or self._match[self._fallback[child]]
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        """The node after `char`: the longest suffix of the text that is a prefix of some stop string."""
        while node and char not in self._next[node]:
            node = self._fallback[node]
        return self._next[node].get(char, 0)

    def scan(self, node: int, piece: str) -> tuple[int, int, str]:
        """Go through `piece` from `node`. Returns the node after it, and start (relative to the piece, negative where it began
        earlier) and text of the winning match; an empty text for none."""
        start, won = 0, ""
        begin = 0
        if node == 0:
            first = self._first_chars.search(piece) if self._first_chars else None
            if first is None:
                return 0, 0, ""
            begin = first.start()
        for end, char in enumerate(piece[begin:], begin + 1):
            node = self.step(node, char)
            match = self._match[node]
            if match and (not won or end - len(match) < start):
                start, won = end - len(match), match
        return node, start, won


class StopMatcher:
    """The scan over one request's text. Feed it the text of one token at a time: that is what makes the result independent of chunks."""

    __slots__ = ("_held", "_node", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = 0
        self._held = ""

    def feed(self, piece: str) -> str | StopMatch:
        """Take the text of the next token; returns the text that may be shown now, or the match that ends the output (no call may follow)."""
        node, start, won = self._stops.scan(self._node, piece)
        text = self._held + piece
        if won:
            return StopMatch(won, text[: len(self._held) + start])
        self._node = node
        kept = len(text) - self._stops.depth[node]
        self._held = text[kept:]
        return text[:kept]

    def flush(self) -> str:
        """The text held back, now that nothing can complete it. No feed may follow."""
        held, self._held = self._held, ""
        return held
