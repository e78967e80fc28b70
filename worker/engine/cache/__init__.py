"""The prefix cache: what was computed for prefixes of tokens, and where it is kept.

It has three tiers:
- *cells*: the KV cache of llama.cpp. A slot is one of its sequences; it keeps what a finished
  request has computed until another request needs the slot or the cells.
- *memory*: copies of whole sequences (`State`) and of those parts of recurrent and windowed memory
  that cannot be cut (`Snapshot`), in the host's RAM.
- *disk*: files of states, which other engines can continue from (`--kv-store`).

Each tier has one budget (cells, bytes, bytes), and evicts what was least recently used. What leaves
its cells is copied to memory if it may be used again. What a finished request leaves in its slot is
soon written to the disk, too, if there is one. A state is brought back if that takes less time than
computing its tokens, by the measured seconds per byte and per token. A locked state is not evicted:
a request will continue from it, such as a preempted one, which computes nothing twice.

`Cache` keeps the books, in plain Python: it decides, and records the `moves` that follow.
`Carrier` carries the moves out in order, with native calls and clocks. `DiskTraffic` has the disk's
threads read files, and write what is new.
The scheduler uses few methods of `Cache`: `match` a prompt, `acquire` a slot for it, `release` or
`preempt` it, and make `room`.

llama.cpp copies between the parts of a split pool when it computes the next batch, but writes a
state at once. Until the next batch has been computed, no move may therefore read a slot that
another has written, nor write a slot that another has read or written: the request that wants it
waits for one step.
"""
