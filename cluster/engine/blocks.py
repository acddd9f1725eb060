"""Blocks of the paged KV pool, and the prefix cache over them.

A block that no sequence holds but whose content is known stays in the free list as a cache entry: a
sequence either finds it by hash (`match`, `acquire`) or takes it for new content (`allocate`).

With a sliding window in every layer, a sequence holds only blocks that its next token's window
reaches. A block table keeps its length: the entry of a block that is not held any more, or never
was, is the scratch block. So a hit needs only the blocks in the window of its next token to be
cached.

Sources: paged blocks after PagedAttention (Kwon et al., 2023); chained block hashes and eviction of
a sequence's tail before its head after vLLM's prefix cache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Tokens

from cluster.config import EngineConfig
from cluster.engine.prefix_index import Prefix, prefix_of
from cluster.engine.sequence import Sequence
from cluster.wire.messages import GenerateRequest
from compile.errors import FieldError

SCRATCH = 0
"""In a block table: no block, because nothing will read there."""
DIGEST_BYTES = 16
"""128 bits: a collision would show one request another's context."""


def max_blocks_for(num_tokens: int, block_size: int, sliding_window: int | None) -> int:
    num_blocks = -(-num_tokens // block_size)
    if sliding_window is None:
        return num_blocks
    # A window's tokens lie in at most this many blocks, wherever it starts.
    return min(num_blocks, (sliding_window - 2) // block_size + 2)


def check_num_blocks(config: EngineConfig, sliding_window: int | None, num_blocks: int) -> None:
    """Refuse a pool that does not hold one sequence, however long."""
    length = config.max_model_len
    needed = max_blocks_for(length, config.cache.block_size, sliding_window)
    if num_blocks < needed:
        wanted = f"at least {needed} (one sequence of max_model_len={length})"
        raise FieldError("num_kv_blocks", wanted, num_blocks)


def block_digest(parent: bytes, token_ids: Tokens[int]) -> bytes:
    """Return the digest of a full block and all before it. parent: that of the block before it, or
    the request's root."""
    return hashlib.blake2b(parent + array("q", token_ids), digest_size=DIGEST_BYTES).digest()


def prefix_root(request: GenerateRequest) -> bytes:
    """Return what goes before a request's tokens: its salt, and its adapter, by which the same
    tokens have other keys and values."""
    return request.cache_salt + (
        request.adapter_id.to_bytes(4, "little") if request.adapter_id else b""
    )


def prompt_prefixes(request: GenerateRequest, block_size: int, num_behind: int = 0) -> list[Prefix]:
    """Return the prefixes of the blocks that an engine's prefix cache may have of a prompt: as
    `match` looks them up."""
    token_ids, parent = request.prompt_token_ids, prefix_root(request)
    if request.sampling.num_prompt_logprobs >= 0:
        return []
    prefixes: list[Prefix] = []
    for end in range(block_size, len(token_ids), block_size):
        parent = block_digest(parent, token_ids[end - block_size : end + num_behind])
        prefixes.append(prefix_of(parent))
    return prefixes


class BlockManager:
    """Owns the blocks 1..num_blocks of a pool; block 0 is scratch for padding and never given out.
    Invariant: a block is in the free list exactly when its reference count is 0, and a block's hash
    is known exactly while the cache points from that hash to it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        sliding_window: int | None = None,
        changes: deque[tuple[bytes, bool]] | None = None,
        num_behind: int = 0,
    ) -> None:
        """No layer reads more than its last `sliding_window` tokens, its own included. `changes` is
        told what is cached and what is no more, see `PrefixFeed`. The KV of a token follows from
        `num_behind` tokens behind it too: 1 where an MTP layer has some."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.sliding_window = sliding_window
        self.generations = [0] * (num_blocks + 1)
        """Counts how often each block was handed out for new content."""
        self.prefix_queries = 0
        """Tokens of admitted sequences that were looked up; a re-admission counts again."""
        self.prefix_hits = 0
        self._ref_counts = [0] * (num_blocks + 1)
        self._hashes: list[bytes | None] = [None] * (num_blocks + 1)
        self._cached: dict[bytes, int] = {}
        self._changes = changes
        self._num_behind = num_behind
        # Least recently used first; blocks without content worth keeping before all others.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, cached ones included."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_blocks_for(self, num_tokens: int) -> int:
        return max_blocks_for(num_tokens, self.block_size, self.sliding_window)

    def first_needed(self, num_computed: int) -> int:
        """Return the first block that the token at position `num_computed` reads."""
        if self.sliding_window is None:
            return 0
        return max(num_computed - self.sliding_window + 1, 0) // self.block_size

    def match(self, seq: Sequence) -> list[int]:
        """Return the cached blocks of the sequence's longest head; changes nothing. The last token
        is never covered, because it must be computed to get logits; so must all others if their
        log-probabilities are wanted. Blocks that the next token does not read are scratch."""
        if not self._is_looked_up(seq):
            return []
        num_blocks = (seq.num_tokens - 1) // self.block_size
        if self.sliding_window is not None:
            return self._match_window(self._hash(seq, num_blocks))
        found: list[int] = []
        # Hashed one by one: a long prompt mostly begins with what was never computed.
        for i in range(num_blocks):
            block = self._cached.get(self._digest(seq, i))
            if block is None:
                break
            found.append(block)
        return found

    def first_missing(self, seq: Sequence, num_cached: int) -> bytes | None:
        """Return the digest of the block that ended a match of `num_cached` blocks, if one did."""
        is_whole = num_cached >= (seq.num_tokens - 1) // self.block_size
        if self.sliding_window is not None or is_whole or not self._is_looked_up(seq):
            return None
        return self._digest(seq, num_cached)

    def is_cached(self, digest: bytes) -> bool:
        return digest in self._cached

    def _is_looked_up(self, seq: Sequence) -> bool:
        return self.enable_prefix_caching and not seq.wants_prompt_logprobs

    def _match_window(self, digests: list[bytes]) -> list[int]:
        """Return the longest head whose last blocks are cached, as far as a window reaches."""
        found = [self._cached.get(digest, SCRATCH) for digest in digests]
        start = len(found)  # of the run of cached blocks that ends at `end`
        for end in range(len(found), 0, -1):
            start = min(start, end)
            while start > 0 and found[start - 1] != SCRATCH:
                start -= 1
            needed = self.first_needed(end * self.block_size)
            # A window of one token needs none; a hit is still of something that was computed.
            if start <= min(needed, end - 1):
                return [SCRATCH] * needed + found[needed:end]
        return []

    def num_saved(self, cached: list[int], first: int = 0) -> int:
        """Return how many free blocks fewer a new sequence takes than its tokens fill, if `match`
        found `cached` and none is needed before `first`."""
        # A hit that no sequence holds comes out of the free list too.
        num_free = sum(block != SCRATCH and self._ref_counts[block] == 0 for block in cached)
        return max(len(cached), first) - num_free

    def room_beside(self, cached: list[int]) -> int:
        num_held = len(cached) - cached.count(SCRATCH)
        return (self.num_blocks - num_held) * self.block_size

    def acquire(self, seq: Sequence, cached: list[int]) -> None:
        for block in cached:
            if block == SCRATCH:
                continue
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1
        seq.block_table.extend(cached)
        seq.num_committed_blocks = len(cached)
        seq.num_dropped_blocks = 0
        if self.enable_prefix_caching:
            self.prefix_queries += seq.num_tokens
            self.prefix_hits += len(cached) * self.block_size

    def allocate(self, seq: Sequence, num_tokens: int, first: int = 0) -> list[int] | None:
        """Grow the block table to cover `num_tokens` tokens; return the new entries, scratch before
        `first`; or None, with nothing changed, if too few blocks are free."""
        start, stop = len(seq.block_table), self.num_blocks_for(num_tokens)
        num_scratch = max(first - start, 0)
        num_new = stop - start - num_scratch
        if num_new > len(self._free):
            return None
        new = [SCRATCH] * num_scratch + [self._take() for _ in range(num_new)]
        seq.block_table.extend(new)
        return new

    def drop_outside_window(self, seq: Sequence) -> None:
        """Free what neither a token nor a step in flight will read any more."""
        start, stop = seq.num_dropped_blocks, self.first_needed(seq.num_confirmed_tokens)
        if stop <= start:
            return
        # The head goes first here: with its tail alone a hit is as long as ever.
        self._drop(seq.block_table[start:stop])
        seq.block_table[start:stop] = [SCRATCH] * (stop - start)
        seq.num_dropped_blocks = stop

    def give_back(self, seq: Sequence) -> None:
        """Free the blocks behind the sequence's computed tokens: a wrong draft's."""
        stop = self.num_blocks_for(seq.num_computed_tokens)
        self._drop(reversed(seq.block_table[stop:]))
        del seq.block_table[stop:]

    def free(self, seq: Sequence) -> None:
        self._drop(reversed(seq.block_table))
        seq.block_table.clear()
        seq.num_dropped_blocks = 0

    def _drop(self, blocks: Iterable[int]) -> None:
        """Drop a hold on each; of what becomes free, the first is evicted first."""
        for block in blocks:
            if block == SCRATCH:
                continue
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def commit(self, seq: Sequence) -> None:
        """Enter the sequence's full blocks into the prefix cache, as far as their KV is there."""
        num_known = min(seq.num_confirmed_tokens, seq.num_tokens - self._num_behind)
        num_full = num_known // self.block_size
        if not self.enable_prefix_caching or num_full <= seq.num_committed_blocks:
            return
        hashes = self._hash(seq, num_full)
        for i in range(seq.num_committed_blocks, num_full):
            digest, block = hashes[i], seq.block_table[i]
            # Two sequences may compute the same content side by side: the first one's is kept.
            if block != SCRATCH and digest not in self._cached:
                self._cached[digest] = block
                self._hashes[block] = digest
                if self._changes is not None:
                    self._changes.append((digest, True))
        seq.num_committed_blocks = num_full

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        digest = self._hashes[block]
        if digest is not None:
            del self._cached[digest]
            self._hashes[block] = None
            if self._changes is not None:
                self._changes.append((digest, False))
        self._ref_counts[block] = 1
        self.generations[block] += 1
        return block

    def _hash(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """Return the first full blocks' digests: of the root and all tokens up to their ends, and
        those behind that their KV follows from: all are known once a block is full or looked up."""
        hashes, size = seq.block_hashes, self.block_size
        for i in range(len(hashes), num_blocks):
            parent = hashes[i - 1] if i else prefix_root(seq.request)
            end = (i + 1) * size + self._num_behind
            hashes.append(block_digest(parent, seq.token_ids[i * size : end]))
        return hashes if len(hashes) == num_blocks else hashes[:num_blocks]

    def _digest(self, seq: Sequence, i: int) -> bytes:
        hashes = seq.block_hashes
        return hashes[i] if i < len(hashes) else self._hash(seq, i + 1)[i]
