# %% [markdown]
# # 8. Your engine
#
# Now you build one: a scheduler, a layout, memory in pages, and a prefix cache. Four steps of 10 to
# 30 lines each, about two hours in all. After each step a judge runs your functions and says in a
# sentence what is wrong, if anything is; you may try as often as you like. At the end your engine
# serves twelve prompts, beside ours.

# %%
from collections import deque
from lesson import letters, source
from capstone import Memory, judge, race, serve
import torch
from model import head

# %% [markdown]
# The judge is made of tests. It mixes long and short prompts, greedy and sampled, so that few bugs
# hide. It compares logits and tokens with each request alone, and measures what every token sees.
# It also counts passes, slots, pages and attention's multiplications, because waste does not change
# tokens: an engine that serves one request at a time gives the right ones, too.
#
# ## The loop
#
# This is given. Everything called `yours.` is for you to write, step by step. Until step 3 there is
# no `memory`: each request has a KV cache of its own. The rest you need not see: `Batch` makes
# tensors of what your `lay_out` returns; its `sampled` are the requests of `due`, and `wanted` says
# which tokens' logits they need. `InPages` is a request's cache in the pool, by your `slots`. The
# judge has `trace`, `watch` and `on_token`.

# %%
source(serve)

# %% [markdown]
# What a request offers:
#
# | | |
# |---|---|
# | `request.tokens` | prompt and generated tokens, a list; `request.prompt` is the first part |
# | `request.computed` | how many of them are computed: their keys are in the cache |
# | `request.todo` | how many are not; 1 in a decode |
# | `request.arrival`, `request.name` | the step in which it arrives; a letter |
# | `request.append(token)` | adds a generated token; afterwards `request.finished` may be True |
# | `request.kv.write(layer, start, k, v)` | stores `(heads, n, features)` from a position on |
# | `request.kv.read(layer, end)` | returns keys and values `(heads, end, features)` |
# | `request.block_table` | from step 3 on: its pages, a list of numbers |
#
# ## Step 1: which request computes how much?
#
# `waiting` is a deque of requests, the next one on the left; `running` is a list. Both are in order
# of arrival. `schedule` makes the plan of a step, and moves those that may start from `waiting` to
# `running`. It hands out `token_budget` tokens, in order.
#
# 1. Each request in `running` gets its `todo`, or what is left of the budget. Before that, ask
#    `make_room(request, n)`, which returns whether its next n tokens have room in memory. Until
#    step 3 that is always so. Then memory may be short: requests are taken from the *end* of
#    `running`, and put back into `waiting`. It returns False if this request is one of them.
# 2. Then newcomers get the rest: the first of `waiting` starts as long as
#    - some of the budget is left, and fewer than `max_batch` requests run;
#    - it has arrived;
#    - `admit(request)` returns True. That gives it memory, so ask last: then it must start. It may
#      also change its `todo`, in step 4.
#
#    It gets its `todo`, or what is left. Ask `make_room` for it, too: that succeeds.
# 3. None overtakes the first in the queue. And in a step that took a request from `running`, nobody
#    is admitted: it would find its pages, and come back at once.
#
# Say that A and B decode, C's prompt has 12 tokens, and the budget is 8. Then the plan is `[(A, 1),
# (B, 1), (C, 6)]`. A request that gets nothing is not in it.

# %% tags=["exercise"]
def schedule(waiting, running, step, max_batch, token_budget, admit, make_room):
    """Returns the plan, [(request, n), ...]; moves those that start to `running`."""
    ...

# To try it, with prompts of 1 and 12 tokens, 3 to generate, and enough memory:
# plan = schedule(deque(letters(3, A=1, C=12)), [], 0, 4, 8, lambda r: True, lambda r, n: True)
# print([(request.name, n) for request, n in plan])
judge(1, schedule)

# %% [markdown]
# <details><summary>A hint</summary>
#
# A `for` over `running`, and a `while` over `waiting`, with a `break` or a last condition for
# `admit`. One variable says what is left of the budget. A `for` over a list may go on while its end
# is cut off: that is what `make_room` does. How does one see afterwards that somebody has left?
# </details>
#
# ## Step 2: one stream
#
# A plan becomes a stream `(N,)`: the tokens of its requests one after another, those from
# `computed` on. `cu_seqlens` says where each begins, and ends with N. `due` lists which entries of
# the plan get a next token: those whose `n` is all that they have to do. Say A decodes at position
# 3; B's prompt has 7 tokens, 2 are computed, and this step computes 3 more. Then positions are `[3,
# 2, 3, 4]`, cu_seqlens `[0, 1, 4]`, due `[0]`.
#
# `attend` is called once in each layer, with queries, keys and values `(heads, N, features)` of the
# stream. First store all new keys and values, of all requests: in step 4 a request reads what
# another one stores in the same pass. Then let each request's queries see that request's cache.
# `head(q, k, v)` computes attention; if k is longer than q, the queries belong to the last keys.
#
# After the pass: add n to each entry's `computed`, hand out the tokens (a list, one for each entry
# of `due`), and take finished requests out of `running` itself: it is the loop's list.

# %% tags=["exercise"]
def lay_out(plan):
    """Returns four lists: tokens, positions, cu_seqlens, due."""
    ...

def attend(plan, cu_seqlens, layer, q, k, v):
    """Returns the output (heads, N, features), in the order of the stream."""
    ...

def after_pass(plan, due, tokens, running):
    """Returns the requests that have finished, a list. They are no longer in `running`."""
    ...

judge(2, lay_out, attend, after_pass)

# %% [markdown]
# <details><summary>A hint</summary>
#
# Notebook 4 has the second loop. During a pass `request.computed` is still what it was before: a
# request's new keys start there, and its cache ends at `request.computed + n`. `torch.cat(...,
# dim=1)` joins the parts. In `after_pass`, first add n to `computed` for every entry of the
# plan.</details>
#
# Your engine serves. It reserves memory for the longest answer, as *ragged* does.
#
# ## Step 3: pages
#
# `memory` is a pool of pages:

# %%
source(Memory)

# %% [markdown]
# - `slots` translates positions into slots of the pool; page p has the slots from `p * memory.size`
#   on. `[7, 2]` with 4 tokens to a page: position 5 is in slot 9.
# - `admit` returns whether the free pages can hold *all* tokens that a request has. If so, its
#   `block_table` becomes an empty list: it takes no page yet. (`cached` and `find` are for step 4.)
# - `make_room` is asked before n tokens of a request are planned. It gives it the pages that it
#   needs for them, and no more, by `memory.take()`. While too few are free, the *last* request in
#   `running` is preempted, perhaps the one that needs the pages: it gives back its own (by your
#   `free`) and goes to the front of `waiting`; its `computed` becomes 0, and its tokens stay. It
#   returns True; or False, if the request itself was preempted.
# - `free` puts a request's pages back, at the end of `memory.free`; its `block_table` becomes None.

# %% tags=["exercise"]
def slots(memory, request, start, end):
    """Returns the slots of positions start to end - 1, a list."""
    ...

def admit(memory, request):
    """Sets request.block_table to an empty list, and returns True; or False."""
    ...

def make_room(memory, running, waiting, request, n):
    """Gives it pages for its next n tokens, and returns True; or False."""
    ...

def free(memory, request):
    """Puts its pages back; returns nothing."""
    ...

judge(3, slots, admit, make_room, free)

# %% [markdown]
# <details><summary>A hint</summary>
#
# `-(-a // b)` rounds up. How many pages do `computed + n` tokens need? The token that the pass
# samples is not one of them: it gets its key in the next pass. While more are missing than are
# free, preempt `running.pop()`: it may be the request itself.</details>
#
# ## Step 4: prefixes
#
# New versions of `admit` and `free`, and one new function; `slots` and `make_room` stay.
#
# - `keep` is called when n tokens of a request are planned, and it has its pages; `computed` is
#   still as it was before. Every page that becomes full by these tokens can be found from now on,
#   under a key of your choice: `memory.cached[page] = key`. So a request that is admitted in the
#   same step finds it already. That is right because your `attend` stores all keys before it reads
#   any.
# - `admit`, in this order:
#   1. It looks for the request's full pages from the beginning on, `memory.find(key)`, until one is
#      not found. The last token is always computed, so its page is never taken from the cache.
#   2. If there are not enough free pages for the rest, it returns False and changes nothing. A
#      found page that is free is no longer free: with 3 free pages, 2 of them found, and 2 more
#      needed, it returns False.
#   3. The table begins with the found pages: their `ref_count` grows by 1, and those that were free
#      leave `memory.free`. The others it gets later, from `make_room`.
#   4. `computed` says how many tokens were found.
# - `free` counts down, the last page first. A page whose `ref_count` is 0 goes to the end of
#   `memory.free`, and stays in `cached` until it is taken. But one that is not in `cached`, which
#   nobody can find, goes to the front.
#
# What must a key say, so that a page is never found after the wrong beginning? (Notebook 5.) It can
# be anything that a dict accepts, also a long tuple.

# %% tags=["exercise"]
def admit(memory, request):
    """As before; but its table begins with the pages that are found."""
    ...

def keep(memory, request, n):
    """From now on the pages that its next n tokens fill can be found; returns nothing."""
    ...

def free(memory, request):
    """As before; but a page may be in another block table."""
    ...

judge(4, admit, keep, free)

# %% [markdown]
# <details><summary>A hint</summary>
#
# Key of page i: `tuple(request.tokens[:(i + 1) * memory.size])`, all tokens up to its end. (Engines
# hash them.) A pass that computes tokens `c` to `c + n - 1` fills the pages in
# `range(c // size, (c + n) // size)`. In `admit`, page i may be found only if `(i + 1) * size` is
# less than the number of tokens.</details>
#
# ## The race
#
# Twelve prompts behind a common beginning of 48 tokens, 64 tokens a step, and a pool of 40 pages:
# too few, so both engines preempt. *Worst gap* is the longest wait between two tokens of a request.

# %%
race()

# %% [markdown]
# If your line equals ours, you have written the stage *prefix*, the last of this repository. It
# plans as vLLM's own scheduler plans, pass by pass ([docs/vllm.md](../docs/vllm.md)).
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
# - [The course kit](../assignments/README.md) asks for many of these functions with more rules and
#   more tests, and for new ones: on the fused rectangle, on auditing a pool, on guessing tokens.
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
# The first one is planned, and `keep` names the pages that this pass will fill. So the second,
# which is admitted after it, finds them, and computes only what is behind its last full page. In
# the pass, each layer stores the keys of both before the second reads those of the first. (If the
# pass fails, nothing was filled, and the names must be taken back: `undo` in
# `generate_prefix.py`.)</details>
