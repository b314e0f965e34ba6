"""Where a text comes to a stop string. Engines speak in token ids: here, and only here, they read text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.rollout.rows import Row

Decode = Callable[[Sequence[int]], str]
MARGIN = 8  # tokens behind which a window is right: some decode to nothing, and the first ones without their context


class StopStrings:
    """Looks for the stop strings of rows. A row ends with the token that completes one: the string stays in the text.

    `decode` turns ids to text, special tokens left out.
    """

    def __init__(self, decode: Decode, vocabulary: int) -> None:
        self._decode = decode
        self._vocabulary = vocabulary
        self._enders: dict[str, frozenset[int] | None] = {}

    def length(self, row: Row) -> int | None:
        """The number of tokens after which the row ends, or None. Looks at what has come since it last looked."""
        strings = row.sampling.stop_strings
        begin, row.looked = row.looked, len(row.tokens)
        for count in range(begin + 1, len(row.tokens) + 1):
            if any(self._ends(row.tokens, count, string) for string in strings):
                return count
        return None

    def _ends(self, tokens: Sequence[int], count: int, string: str) -> bool:
        """Whether the last of the first `count` tokens completes the string."""
        enders = self._tokens_with(string[-1])
        if enders is not None and tokens[count - 1] not in enders:
            return False
        return string in self._decode(tokens[max(0, count - len(string.encode()) - MARGIN) : count])

    def _tokens_with(self, character: str) -> frozenset[int] | None:
        """The ids that may complete a string with this last character: few, so that few texts are read. None: any.

        A character of several bytes may be cut between tokens, and some tokenizers drop a space at a text's beginning.
        """
        if character not in self._enders:
            known = character.isascii() and character != " "
            ids = range(self._vocabulary)
            self._enders[character] = frozenset(i for i in ids if character in self._decode([i])) if known else None
        return self._enders[character]
