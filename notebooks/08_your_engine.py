# %% [markdown]
# # 8. Your engine
#
# Now you build one: a scheduler, a layout, memory in pages, and a prefix cache. You write thirteen
# functions, most of them 5 to 20 lines long, in four steps. Each takes the place of one of ours. At
# the end the stage *prefix* runs on your code, and serves twelve prompts beside ours.
#
# You have read most of them in notebooks 3 to 5. Write them without looking back: then you see
# which rule you would have forgotten. A weak day takes three hours and a half, a good one half of
# that. Each step ends with two hints, and `give_up(1)`, in a new cell, takes our code for what is
# not right yet in step 1, and shows it: so everybody gets to the race.

# %%
from collections import deque
from lesson import letters, source
from capstone import give_up, judge, race
import torch
import generate_ragged
from generate_prefix import page_hash
from generate_ragged import Flat
from model import head
from request import indices_due
from scheduler import Scheduler

# %% [markdown]
# `judge` tries each function alone, in the place of ours, on small cases and then on larger ones.
# It says in a sentence what goes wrong in the smallest one. It names the usual mistake that gives
# the same result, if it knows one. It also counts attention's *operations*, because waste does not
# change tokens. Write one function, judge it, and go on: those that are still blank do not matter.
# Once a step is right, its stage serves four requests with your functions.
#
# You may `print` in your functions: of the case that fails, `judge` shows the first ten lines. In
# its sentences A, B, ... are the requests in their order, and `A2 B1` is a plan: 2 tokens of A, 1
# of B.
#
# ## Step 1: which request computes how much?
#
# What a request offers:
#
# | | |
# |---|---|
# | `request.computed` | how many of its tokens are computed: their keys are in the cache |
# | `request.todo` | how many are not; 1 in a decode |
# | `request.slice(i, j)` | its tokens i to j - 1, prompt and generated ones together |
# | `request.append(token)` | adds a generated token; afterwards `request.finished` may be True |
#
# A *plan* is a list of pairs (request, n): the step computes n tokens of each. `schedule` is a
# method of `Scheduler`, so it begins with `self`. It finds there `self.running`, a list, and
# `self.waiting`, a deque, both in order of arrival; `self.token_budget` and `self.max_batch`.
#
# 1. Each request in `self.running` gets its `todo`, or what is left of the budget. A request that
#    gets 0 tokens is not in the plan. Before one gets n tokens, ask `self.make_room(request, n)`:
#    do they have room in memory? If memory is short, this call takes requests from the *end* of
#    `self.running` and puts them into `self.waiting`. It returns False if this request is among
#    them. Those that are taken are not in the plan.
# 2. Then newcomers get the rest. The first of `self.waiting` moves to the end of `self.running` as
#    long as
#    - some of the budget is left, and fewer than `max_batch` requests run;
#    - it has arrived: `self.arrived(step)`, which looks at the first of `self.waiting` (False if
#      nobody waits);
#    - `self.admit(request)` returns True. That gives it memory. So ask this last: a request that
#      has memory must start.
#
#    It gets its `todo` (only now: `admit` may have found computed tokens), or what is left. Ask
#    `make_room` for it, too: that succeeds.
# 3. If the first in the queue cannot start, none behind it does. And in a step in which `make_room`
#    took a request from `self.running`, none is admitted: it would come back at once.
# 4. A plan may be empty only if no request runs and none has arrived. In any other case an empty
#    plan changes nothing, so the next one would be empty as well, and so on for ever. Raise a
#    `RuntimeError` then. Its text contains `str(request)` of the first that runs; if none runs, of
#    the first that waits.
#
# Say that A and B decode, C's prompt has 12 tokens, and the budget is 8. Then the plan is `[(A, 1),
# (B, 1), (C, 6)]`.
#
# No rule puts decodes first, yet A and B never wait for C's prompt. Step by step:
#
# - C has 12 tokens to do and gets the 6 that are left, so the budget is used up;
# - nobody is admitted behind C in this step, nor in a later one until C has all its 12;
# - so while C is incomplete it is the last that runs, and A and B before it need one token each.
#
# So only the last request that runs can be half done. It is also the first that `make_room` takes.
#
# After the pass, `advance(plan, tokens)` records it. Each request has n more tokens computed. Those
# whose `todo` the plan covers in full are *due*: they get a token. `indices_due(plan)` returns
# their places in the plan, and `tokens` has one token for each of them only, in this order. Both
# lists stay as they are. (`advance` takes plans of any scheduler. Yours never plans n = 0; another
# may, and such a request is not due.)
#
# In the judge's sentences, `refused` is a request for which `admit` returns False. `finds 2` says
# that `admit` finds two computed tokens, and `room 6` that this step has memory for 6 new tokens.

# %% tags=["exercise"]
def schedule(self, step):
    """Returns the plan, [(request, n), ...]; moves those that start to self.running."""
    ...

def advance(plan, tokens):
    """Counts what is computed, and hands out the tokens; returns nothing."""
    ...

judge(1, schedule, advance)

# %% [markdown]
# <details><summary>A hint: the way</summary>
#
# In `schedule`, a `for` over the running requests, then a `while` for newcomers. One variable says
# what is left of the budget. How does one see, after the `for`, that a request has left? In
# `advance`: which requests are due changes as soon as `computed` does.</details>
#
# <details><summary>A second hint: nearly code</summary>
#
# `schedule`:
#
# - Keep `before = len(self.running)`.
# - For each request of `self.running`: `n = min(request.todo, budget)`. If n is not 0 and there is
#   room, append the pair to the plan and subtract n from the budget. Walk over `self.running`
#   itself, not over a copy: when `make_room` removes its last requests, the `for` ends before them.
# - After the loop, `preempted = len(self.running) < before`.
# - While budget is left, not `preempted`, and fewer than `max_batch` run: `break` unless the first
#   that waits has arrived and is admitted. Otherwise take it from `self.waiting` by `popleft`,
#   append it to `self.running`, compute its n, ask `make_room`, append the pair, and subtract n.
#
# `advance`: first collect the requests that are due; then add every n; then `append` the
# tokens.</details>
#
# Your scheduler serves: *chunked*, and also *ragged*, whose loop you see here. It stays as it is.

# %%
source(generate_ragged.generate)

# %% [markdown]
# ## Step 2: one stream
#
# `Flat` turns a plan into a stream of N tokens, those of its requests one after another. Its
# constructor has set `self.plan`; `self.starts[i]`, how many tokens the i-th request has computed;
# `self.ends[i]`, how many it has after this pass; and `self.cu_seqlens`: the i-th request owns the
# tokens from `cu_seqlens[i]` to `cu_seqlens[i + 1]` of the stream.
#
# `lay_out` sets four attributes, with tensors on `device`:
#
# | | |
# |---|---|
# | `self.tokens`, `self.positions` | long `(N,)`: each new token, and its position in its request |
# | `self.sampled` | a list: the requests that are due |
# | `self.wanted` | long `(R,)`: the place in the stream of the last token of each of these |
#
# Say A decodes at position 3; B's prompt has 7 tokens, 2 are computed, and this pass computes 3
# more. Then positions are 3 2 3 4, `cu_seqlens` is `[0, 1, 4]`, and `wanted` is `[0]`. (A tensor of
# an empty list needs `dtype=torch.long`.)
#
# `attend` is called once in each layer, with queries, keys and values `(heads, N, features)` of the
# stream. First each request's new keys and values go into its own cache: `request.kv.write(layer,
# start, k, v)`. Then `request.kv.read(layer, end)` gives all of its keys and values, a pair. With
# the list of these pairs, `attend` returns `self.attend_varlen(q, caches)`.
#
# `attend_varlen` lets each request's queries see that request's cache, and computes nothing else.
# `head(q, k, v)` computes attention, and applies the causal rule. It takes the queries for those of
# the *last* tokens: with 2 queries and 7 keys, the first query sees keys 0 to 5, the second 0 to 6.
# So give it the queries of one request and all of that request's keys. Then put the outputs one
# behind the other, as the tokens stand in the stream. The output has q's dtype. (Our own code has a
# second way beside `attend_varlen`, with a mask.)
#
# In the judge's sentences, `rows` are the requests of the plan, with n new tokens each. Outputs are
# rounded to three digits, and said by token (of the request's new ones) and head. `layer 3` is a
# layer's number: what you write and read is that layer's.

# %% tags=["exercise"]
def lay_out(self, device):
    """Sets tokens, positions, sampled and wanted; returns nothing."""
    ...

def attend(self, layer, q, k, v):
    """Returns the output (heads, N, features)."""
    ...

def attend_varlen(self, q, caches):
    """Returns the output (heads, N, features), in the order of the stream."""
    ...

judge(2, lay_out, attend, attend_varlen)

# %% [markdown]
# <details><summary>A hint: the way</summary>
#
# You wrote the loop of `attend_varlen` in notebook 4. `attend` is a loop over plan, starts, ends
# and the slices of the stream. In `lay_out`, tokens and positions are lists that grow request by
# request; the last token of request i is the one before `cu_seqlens[i + 1]`.</details>
#
# <details><summary>A second hint: nearly code</summary>
#
# `tokens += request.slice(start, end)` and `positions += range(start, end)`. `due =
# indices_due(self.plan)` are numbers of plan entries. In `attend`, the i-th request's part of k is
# `k[:, cu_seqlens[i]:cu_seqlens[i + 1]]`. In `attend_varlen`, take the same part of q, and join
# the outputs with `torch.cat(..., dim=1)`.</details>
#
# Your engine serves. It reserves memory for the longest answer, as *ragged* does.
#
# ## Step 3: pages
#
# The pool `self.pool` has `page_size` tokens to a page; page p has the slots from `p * page_size`
# on. `request.block_table` lists a request's pages. `self.pool.free_queue` holds the free pages;
# read only its length. **Take pages only by `self.pool.allocate(table, number)`**, which moves so
# many free pages to the end of a table. **Give them back only by `self.free(request)`.** Step 4 has
# a pool with another queue, which also counts in how many tables a page is. Your step 3 has to work
# with it, too, so it is judged with both. `self.pool.needed(tokens)` says how many pages so many
# tokens take.
#
# - `lay_out`, of `Paged`: call `Flat.lay_out(self, device)`, which is yours. Then set the four
#   tensors that a *kernel*, a GPU's program for attention, is given. All are long; B is the number
#   of requests in the plan:
#   - `self.query_start_loc` `(B + 1,)`: where each request's new tokens begin in the stream, and
#     then where the stream ends;
#   - `self.seq_lens` `(B,)`: how many keys each request has after this pass;
#   - `self.block_table`, on `device`: a row for each request, its pages in their order. All rows
#     are as long as the longest table; behind a shorter table any number may stand;
#   - `self.slot_mapping` `(N,)`, on `device`: the slot of each new token. With the table `[7, 2]`
#     and 4 tokens to a page, position 5 is in page 2, at place 1: slot 2 * 4 + 1 = 9.
# - `admit` returns whether the free pages can hold *all* tokens that a request has. If so, its
#   `block_table` becomes an empty list: it takes no page yet.
# - `make_room` gives a request the pages that it needs for its next n tokens, and no more. While
#   too few are free, it preempts `self.victim()`, the *last* request that runs. If that was the
#   request that asks, it returns False, and takes no page. Otherwise it returns True.
# - `preempt` takes a request out of `self.running`, the list itself, through which `schedule` is
#   walking, and puts it at the front of `self.waiting`. Its pages are free, and its table is None:
#   `self.free(request)` does both. Its `computed` is 0, its tokens stay, and
#   `self.pool.counts["preemptions"]` is one more.
#
# In the judge's sentences, `pages 7` is a pool of 7 pages, and `A (..., pages 2)` is a request
# which holds 2 of them. "A's pages" says how many pages A's table has; None: it has no table.
# `counted True` is the pool of step 4, and a request that `shares 1` has A's first page in its own
# table.

# %% tags=["exercise"]
def lay_out(self, device):
    """As Flat.lay_out; and query_start_loc, seq_lens, block_table and slot_mapping."""
    ...

def admit(self, request):
    """Returns whether it has room; if so, sets request.block_table to an empty list."""
    ...

def make_room(self, request, n):
    """Gives it pages for its next n tokens, and returns True; or False."""
    ...

def preempt(self, request):
    """Back to the queue; returns nothing."""
    ...

judge(3, lay_out, admit, make_room, preempt)

# %% [markdown]
# <details><summary>A hint: the way</summary>
#
# How many pages do `computed + n` tokens need, and how many does the request have? The token that
# the pass samples is not one of them: it gets its key in the next pass. `admit` counts `todo`: a
# request that waits has computed nothing. For `slot_mapping`, go through the positions: which entry
# of the request's table is it, and which place in the page?</details>
#
# <details><summary>A second hint: nearly code</summary>
#
# `more = self.pool.needed(request.computed + n) - len(request.block_table)`; while `more` exceeds
# `len(self.pool.free_queue)`, preempt a victim; if it was the request, return False; then allocate.
# In `lay_out`, a loop will do: for each request and each position p from start to end - 1, the slot
# is `request.block_table[p // size] * size + p % size`. To make tables of one length, append zeros
# to copies of them.</details>
#
# ## Step 4: prefixes
#
# A page can be in several tables now. `ref_count[page]` says in how many. `free_queue` is an
# `OrderedDict`, page -> None, whose first page is taken next. `cached` and `hash_of` say which page
# has which hash, and `pool.find(hashes)`, `pool.share(table, pages)` and
# `pool.register(page, hash)` are given:

# %%
from generate_prefix import PrefixPool
source(PrefixPool.find)
source(PrefixPool.share)
source(PrefixPool.register)

# %% [markdown]
# The first function is the pool's, so `self` is the pool. The other three are the scheduler's:
# `self.pool` is the pool, and one calls another as `self.hash_of_page(request, i)`.
#
# - `free`: the table's pages are in one table less, the *last* page first. Those in no
#   other are free. A page that can be found (it is in `self.hash_of`) goes to the end of the queue;
#   one that nobody can find goes to its front. It returns nothing.
# - `hash_of_page` returns the hash of the request's i-th page, which is full. A hash covers the
#   page's tokens and all before them: `page_hash(before, tokens)` makes it from the hash of the
#   page before (`b""` for the first) and the list of its own tokens. Each is computed once:
#   `request.page_hashes`, empty at first, keeps them.
# - `admit`, in this order:
#   1. It looks for the request's full pages from the beginning on: `self.pool.find`, with the
#      hashes of all full pages *before its last token*, which is always computed.
#   2. If there are not enough free pages for the others, it returns False and changes nothing
#      but `page_hashes`. A found page that is free will leave the queue as well: with 3 free pages,
#      2 of them found, and 2 more needed, it returns False.
#   3. Its table begins with the found pages (`self.pool.share`); the others come from `make_room`.
#   4. `request.computed` says how many tokens were found. It returns True.
# - `cache_filled(request, start, end)` is called when the tokens `start` to `end - 1` are planned.
#   The pages that become full by them can be found from now on: `self.pool.register(page, hash)`.
#   Register a page also if another one has the same hash already: that one may be taken for other
#   tokens first. A request that is admitted in the same step finds these pages, and that is right,
#   because a pass writes all its keys before it reads any.
#
# In the judge's sentences about `admit`, `cached [2, 1]` are the pages that `find` returns for the
# first pages of the request, if all their hashes are asked for. `used` are those of them that
# another table has, and `free` is the free queue. About `hash_of_page`, `pages [0, 1]` are asked
# for one after the other, and a hash is shown by its first eight digits. About `cache_filled`,
# `known [0]` says that another page has the hash of page 0 already.

# %% tags=["exercise"]
def free(self, table):
    """Takes the pages of a table out of use; returns nothing."""
    ...

def hash_of_page(self, request, i):
    """Returns the hash of its i-th page."""
    ...

def admit(self, request):
    """As in step 3; but its table begins with the pages that are found."""
    ...

def cache_filled(self, request, start, end):
    """From now on the pages that these tokens fill can be found; returns nothing."""
    ...

judge(4, free, hash_of_page, admit, cache_filled)

# %% [markdown]
# <details><summary>A hint: the way</summary>
#
# Notebook 5 has `free`. `hash_of_page` extends `request.page_hashes` until it has the i-th. In
# `admit`, how many full pages are there before the last token, if `request.todo` tokens are known
# and none is computed? In `cache_filled`, which pages *end* within `start` to `end`?</details>
#
# <details><summary>A second hint: nearly code</summary>
#
# `self.free_queue[page] = None` puts a page at the end, `self.free_queue.move_to_end(page,
# last=False)` at the front. `full = (request.todo - 1) // size`. Found pages that are free:
# `sum(page in self.pool.free_queue for page in found)`; new pages and these together must not
# exceed the free ones. A pass from `start` to `end` fills the pages in `range(start // size, end //
# size)`.</details>
#
# ## The race
#
# Twelve prompts behind a common beginning of 48 tokens, 64 tokens a step, and a pool of 40 pages:
# too few, so both engines preempt. *Worst gap* is the longest wait between two tokens of a request.

# %%
race()

# %% [markdown]
# If the lines are equal, the last stage of this repository runs on your code. It plans as vLLM's
# own scheduler plans, pass by pass ([docs/vllm.md](../docs/vllm.md)).
#
# **Turn this knob:** `race(pages=64)`, and `race(token_budget=16)`. Which columns change?
# <details><summary>Answer</summary>
#
# With 64 pages no request is preempted: 922 tokens are computed instead of 978, in 71 passes
# instead of 82, and no request waits longer than a step. With 16 tokens a step, prompts take more
# passes, so fewer requests run at once and none is preempted; the tokens that a request gets stay
# the same.</details>
#
# ## Where to go from here
#
# - [The course kit](../assignments/README.md) asks for these functions and for others: the fused
#   rectangle, an auditor of a pool, guessed tokens.
# - [engine.py](../engine.py) opens the loop for requests that come, stream, leave or fail while it
#   runs: `add`, `abort` and `step`.
# - [`beyond/`](../beyond) goes on where the stages end: a request guesses its next tokens
#   (`speculative.py`), a step is planned while the last one is computed (`ahead.py`), and more.
# - [docs/vllm.md](../docs/vllm.md) leads from here into vLLM's files. Pages are *blocks* there,
#   `token_budget` is `max_num_batched_tokens`, `max_batch` is `max_num_seqs`.
#
# ## Two questions
#
# **1.** Your engine's user closes the window while request B runs. What has to happen, and when?
# <details><summary>Answer</summary>
#
# Between two steps: B leaves the list of running requests and gives back its cache or its pages.
# Not during a step, whose plan still names it.</details>
#
# **2.** Two requests with the same prompt arrive in the same step. What does your prefix cache do?
# <details><summary>Answer</summary>
#
# The first one is planned, and `cache_filled` names the pages that this pass will fill. So the
# second, which is admitted after it, finds them, and computes only what is behind its last full
# page. In the pass, each layer stores the keys of both before the second reads those of the first.
# (If the pass fails, nothing was filled, and the names must be taken back: `undo` in
# `generate_prefix.py`.)</details>
