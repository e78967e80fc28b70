"""One cache: what was computed for a beginning of tokens, and where it is kept.

It has three tiers:
- *cells*: the KV cache of llama.cpp. A slot is one of its sequences; it keeps what a finished
  request has computed until somebody else needs the slot or the cells.
- *memory*: copies of whole sequences (`State`) and of those parts of recurrent and windowed memory
  that cannot be cut (`Snapshot`), in the host's RAM.
- *disk*: files of states, which other engines can go on from (`--kv-store`).

Each tier has one budget (cells, bytes, bytes), and in each the least recently used gives way, one
tier down: what leaves its cells is copied to memory, and what is in memory goes to the disk if
there is one. A state is brought back if that takes less time than to compute its tokens; the prices
are seconds a byte and seconds a token, as measured. A locked state stays: a request will go on
from it. A preempted request is such a one: it computes nothing twice.

The books (`Cache`) are plain Python: they decide, and write down the `moves` that follow from it.
`Carrier` carries the moves out in their order, with native calls and clocks; `DiskTraffic` asks the
disk's threads for files, and gives them what is new.
A scheduler uses few verbs of the books: `match` a prompt, `acquire` a slot for it, `release` or
`preempt` it, and make `room`.

llama.cpp copies between the parts of a split pool when it computes the next batch, but writes a
state at once. A slot that a move has written is therefore not read by another move, and one that a
move has read or written is not written by another, before the next batch has been computed: the
request that wants it waits for one step.
"""
