"""Byte-pair encoding by merges (Hugging Face) rewritten as ranks of tokens (tiktoken), where both give the same ids.

Both join neighbours of a word until nothing can be joined. A tokenizer.json lists which pairs may be joined, and the
earliest in the list goes first; tiktoken joins any two whose characters together are a token, lowest rank first:

    merges: 0 "a b", 1 "b c", 2 "ab c"     a b c -> ab c -> abc        ranks: 0 "ab", 1 "bc", 2 "abc"

So tiktoken would join "a" and "bc" as well, which no merge allows. When do the two agree nevertheless? Call a token
made if the merges, applied to its own characters alone, end with it in one piece; its last merge is what made it.

    Whatever stands between two borders that no merge has crossed was joined as if it stood alone. So when x and y are
    neighbours in some word, and xy is a token that is made, then xy alone also comes to x y on its way. What follows
    there must be the merge "x y", since xy does end in one piece. Hence the last merge of a token is the only way in
    which its two halves ever meet, and to join by rank of the token is to join by that merge.

Ranks in the order of these last merges therefore give Hugging Face's ids for every word, and a token that is not made
never appears. What this needs is checked here, token by token, and a list of merges that lacks it is refused.
"""

from collections.abc import Iterable
from itertools import pairwise

from torchtitan_lite.data.vocabulary import VocabularyError

Pair = tuple[str, str]

MOST_SQUARES = 10**7  # of lengths of tokens that no merge makes: some seconds; published files have few such tokens


class Merges:
    """The merges that ever happen: `last[token]` is the pair that makes it, `index[token]` its place in the list."""

    def __init__(self, pairs: list[Pair], characters: Iterable[str]):
        self.index = dict.fromkeys(characters, -1)
        self.last: dict[str, Pair] = {}
        self.place: dict[Pair, int] = {}  # of the pairs in `last`
        listed = {pair: index for index, pair in enumerate(pairs)}
        unmade = []
        for index, (left, right) in enumerate(pairs):
            token = left + right
            if token in self.index or listed[left, right] != index:
                continue  # the token has its last merge; or the same pair stands further down, which is what counts
            if left not in self.index or right not in self.index or self._is_crossed(left, right, index):
                unmade.append((left, right))
                continue
            self.index[token], self.last[token], self.place[left, right] = index, (left, right), index
        for left, right in unmade:
            if left in self.index and right in self.index and not self._is_crossed(left, right, len(pairs)):
                raise VocabularyError(f"the merge {left!r} {right!r} comes before the merges that make its two parts")

    def _is_crossed(self, left: str, right: str, index: int) -> bool:
        """Whether, in `left` + `right` alone, some merge before `index` joins across the border of the two.

        Walks back in time: what touched the border last is undone, until single characters touch it.
        """
        left_until = right_until = index  # when the two that touch are joined to something else
        while self.index[left] >= 0 or self.index[right] >= 0:
            if self.index[left] > self.index[right]:
                left_until, left = self.index[left], self.last[left][1]
            else:
                right_until, right = self.index[right], self.last[right][0]
            joined = self.place.get((left, right))
            if joined is not None and joined < left_until and joined <= right_until:
                return True
        return False

    def join(self, word: str) -> list[str]:
        """The pieces of `word` when no more can be joined. The time grows with its length squared."""
        pieces = list(word)
        while places := [(self.place[pair], at) for at, pair in enumerate(pairwise(pieces)) if pair in self.place]:
            at = min(places)[1]
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        return pieces


def choose_mergeable(vocab: dict[str, int], pairs: list[Pair], characters: Iterable[str], *, whole: bool) -> set[str]:
    """Tokens of `vocab` that tiktoken may make; with their ids as ranks it then does what the merges do.

    `whole`: a word that is a token is never taken apart (`ignore_merges`), so that tokens which no merge makes appear
    too. Raises VocabularyError where the two cannot be the same.
    """
    for pair in pairs:
        if absent := [part for part in (*pair, "".join(pair)) if part not in vocab]:
            raise VocabularyError(f"the merge {' '.join(pair)!r} needs {absent[0]!r}, which is not in its vocabulary")
    merges = Merges(pairs, characters)
    for earlier, later in pairwise(merges.last):
        if vocab[earlier] > vocab[later]:
            why = f"token {vocab[later]} {later!r} is merged later than token {vocab[earlier]} {earlier!r}"
            raise VocabularyError(f"its ids are not in the order of its merges: {why}")
    chosen = set(merges.index)
    letters = set(characters)
    unmade = [token for token in vocab if token not in chosen and token and letters >= set(token)] if whole else []
    if sum(len(token) ** 2 for token in unmade) > MOST_SQUARES:
        why = f"no merges make {len(unmade):,} of its tokens, up to {max(map(len, unmade)):,} characters long"
        raise VocabularyError(f"with ignore_merges, {why}, which would take too long to check")
    for token in unmade:
        pieces = merges.join(token)
        if len(pieces) == 2:
            why = f"no merge joins {' and '.join(map(repr, pieces))}, though they form the token {token!r}"
            raise VocabularyError(f"with ignore_merges, {why}")
        chosen.add(token)
    return chosen
