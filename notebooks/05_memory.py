# %% [markdown]
# # 5. Memory
#
# A request's cache grows with every token, and the length of its answer is not known in advance. So
# how much memory does one give it? First we reserve, then we hand out pages: how a token's place is
# found, what happens when no page is left, how the pages of a common prompt are found again, and in
# which order pages are freed.

# %%
from lesson import ask, broken, check, filling_pool, folded, letters, model, pool, queues, run
from lesson import source, texts, timelines, word
from exercises import exercise
import torch
from lab.experiments.memory import alike
from generate_paged import Paged, paged_attention
from generate_prefix import PrefixPool, PrefixScheduler, page_hash
from paging import PagedScheduler
from scheduler import Scheduler
from lab.views.report import latencies, mean

# %% [markdown]
# ## Reserving
#
# *Chunked*, *interleaved* and *ragged* admit a request when its prompt *and its longest answer* fit
# beside what the others have reserved. (`kv_capacity` is both, less the last token: notebook 2.)

# %%
source(Scheduler.admit)

# %% [markdown]
# Eight requests with prompts of 6 tokens may generate up to 26 tokens each. There is memory for the
# keys and values of 156 tokens, and a budget of 64 tokens a step.

# %%
ask("5.1: How many of the eight can run at the same time?", guess=...)

# %%
crowd = letters(A=6, B=6, C=6, D=6, E=6, F=6, G=6, H=6, new=26)
storm = {"reserve": run("ragged, varlen", crowd, max_kv_tokens=156)}
with folded():
    timelines([storm["reserve"]], columns=1)

# %% [markdown]
# The others wait until the first ones are done. How much of the memory is in use meanwhile?

# %%
for p in storm["reserve"].passes[:26:5]:
    print(f"step {p.step:2}: {sum(first + n for _, first, n in p.work):3} of 156 tokens in use")

# %% [markdown]
# On average 63.5 of the 156 places stay empty, although every answer here is as long as it may be.
# If answers end early, as most do, even more stay empty.
#
# ## Pages
#
# So the stage *paged*, `generate_paged.py`, hands memory out in small pieces of a fixed size,
# *pages*, and only when they are needed. All pages lie in one pool. A request's *block table* lists
# its pages, in the order of its tokens.
#
#     pool         page 0    page 1    page 2    page 3
#                  A0-A3     A8, A9    A4-A7     (free)          4 tokens to a page
#
#     A's table    [0, 2, 1]
#
# (vLLM calls a page a *block*, hence the name of the table.) The pool's slots are numbered from
# page to page: slots 0 to 3 are page 0, slots 4 to 7 page 1, and so on. Which slot is a position's?
# The layout calculates it for each new token of the stream: `slot_mapping`, the last of four
# tensors. The first says where each request's new tokens begin, `seq_lens` how many keys it has
# after this pass, and `block_table` lists its pages. (`row` says to which request of the plan each
# new token belongs.)

# %%
source(Paged.lay_out)

# %%
ask("5.2: B's block table is [5, 3, 6], 4 tokens to a page. Which slot of the pool is position 10?",
    guess=...)

# %% [markdown]
# In an engine a kernel, a program for the GPU, computes attention. Beside the queries and the pool
# it is given these tensors and nothing else, under these names in vLLM. What the kernel does in one
# call, ours does request by request:

# %%
source(paged_attention)

# %% [markdown]
# Suppose that it read on from the first page, as if a request's pages were always neighbours:

# %%
eight = letters(A=9, B=5, C=7, D=3, E=6, F=8, G=4, H=5, new=12)
with broken("pages read in one piece"):
    check("paged", eight, max_batch=4, pages=24, page_size=4)

# %% [markdown]
# All are wrong, but not at their first token: the pages that a prompt gets at once are often
# neighbours, and those added later are not. A test of one token each would have passed. Such a bug
# shows only when a request's pages are scattered, so a test must scatter them.
#
# ## Preemption
#
# A request is admitted if the free pages can hold all tokens that it has. It takes them chunk by
# chunk, as its prompt is computed, and one more whenever its pages are full: `schedule` asks
# `make_room` before it plans n tokens. So pages may run out in the middle of an answer. Then one
# request frees its pages and returns to the front of the queue, with the tokens that it has. Later
# it computes its prompt and those tokens again.

# %%
source(PagedScheduler.admit)
source(PagedScheduler.make_room)
source(PagedScheduler.preempt)
storm["pages"] = run("paged", crowd, pages=39, page_size=4)
timelines([storm["pages"]], columns=1);

# %% [markdown]
# Pink tokens are computed again (their last one is new: a thin green edge). The pool has 39 pages
# of 4 tokens, so the same 156 places, and all eight begin at once. At step 11 each of them needs a
# fifth page, for its 17th token. That makes 40, so H is preempted. At step 15 the other seven need
# a sixth page each, so G is preempted; at step 19 it is F, and at step 23 E. They return when pages
# are free; *computed again* is what it costs. TTFT, the time to the first token, is counted in
# steps here; a token of step 0 takes one step.

# %%
print("                preemptions  steps  mean TTFT (steps)  computed again")
for name, trace in storm.items():
    slots = sum(p.slots for p in trace.passes)
    print(f"{name:16}{trace.counts.get('preemptions', 0):11}{trace.passes[-1].step + 1:7}"
          f"{mean(latencies(trace)['ttft_steps']):19.1f}"
          f"{sum(p.recomputed for p in trace.passes) / slots:15.0%}")

# %% jupyter={"source_hidden": true}
three = letters(A=6, B=6, C=6, new=16)

# %%
ask("5.3: Three requests have prompts of 6 tokens and long answers, and share 9 pages of 4 tokens. "
    "In which step is a request preempted for the first time, and how many tokens does it compute "
    "in the step in which it returns? (two numbers: [.., ..])", guess=...)

# %%
with folded():
    timelines([run("paged", three, pages=9, page_size=4)], columns=1)

# %% [markdown]
# Which request is preempted? The last in the order of arrival. What matters is that the order stays
# the same from step to step. Then the first request in it is never preempted, so it finishes, and
# the next one is the first. (One larger than the pool is refused.) Victims at random could take
# pages from each other forever.
#
# In a step that preempts, nobody is admitted. As long as each request has pages of its own, nobody
# could be: the first in the queue is now the request that has just lost its pages, and no other
# overtakes it. Say that it gave back 4 pages. This happened because fewer pages were free than
# somebody needed, so that one takes all of those and at least one of the 4. Fewer than 4 are left,
# and the request needs 4 or more to come back, for it still has all of its tokens. (Or it asked
# itself, as H did at step 11. Then it needs all that it gave back, all that was free, and more.)
# The rule matters with the prefix cache, below: there the request may find pages that others hold.
# Then it needs fewer pages than it gave back, and would come back at once.
#
# **Turn this knob.** Above, eight requests share 39 pages. Give them 20, and then 52. Predict
# first: how many preemptions are there, and does it still take fewer steps than reserving 156
# tokens (52)?
# <details><summary>Answer</summary>
#
# With 20 pages there are 9 preemptions, and it takes 63 steps: more than reserving takes with 39
# pages' memory. With 52 there are 2, and 33 steps. Pages gain from what others do not need; with
# too little memory they recompute more than they gain.</details>
#
# ## Prefix caching
#
# Sixteen requests begin with the same 120 tokens, as if they had one system prompt, and go on with
# 24 tokens of their own. A key depends on its token and on what comes before it, and here both are
# the same. So the keys and values are the same, and may be computed and kept once. That is *prefix
# caching*: the stage *prefix*, `generate_prefix.py`, which is *paged* with another scheduler.
#
# Two rules:
#
# - Only *full* pages are shared. So no request ever writes into a page that another one reads.
# - The last token of a prompt is always computed, even if its key and value are in a page already.
#   For the next token is chosen by the last token's logits. These are made of its own query's
#   output, layer by layer, and a cache keeps neither queries nor outputs.
#
# All sixteen arrive at step 0, and a step computes at most 64 tokens.

# %% jupyter={"source_hidden": true}
def served(stage):
    """Sixteen requests with 120 tokens in common, and 24 of their own."""
    return run(stage, alike(model.config.vocab_size, requests=16, prefix=120, tail=24, new=16),
               max_batch=16, token_budget=64, pages=160)

# %%
ask("5.4: Pages of 16 tokens. How many tokens of its prompt (120 + 24) does the last of the "
    "sixteen requests compute?", guess=...)

# %%
with folded():
    for stage in "paged", "prefix":
        trace = served(stage)
        print(f"{stage}: {sum(p.slots for p in trace.passes):,} tokens computed in "
              f"{len(trace.passes)} passes, {trace.counts['shared_pages']} pages found")

# %% [markdown]
# How is a page found again? By a *hash*: a short number that is calculated from contents. Equal
# contents have equal hashes, and different contents (with sha256, in practice) different ones. A
# full page's hash is calculated from its own tokens *and the hash of the page before it*. That one
# contains the hash of the page before, and so on to the first. So a hash stands for all tokens from
# the beginning to the end of its page.

# %%
source(page_hash)
source(PrefixPool.find)

# %% [markdown]
# `cached` lists the pages of each hash, which is called `digest` here. There are several if the
# same page was computed more than once.
#
# In the next two questions a letter is a token, and a page has 3. A prompt `abc uvw ghi j` has been
# computed, and nothing is evicted.

# %% jupyter={"source_hidden": true}
def pages_found(*prompts):
    """How many pages each of these prompts finds, if they come one after the other."""
    names = "ABCDEFG"[:len(prompts)]
    requests = letters(new=1, **dict.fromkeys(names, 1))
    for step, (request, prompt) in enumerate(zip(requests, prompts)):
        request.arrival = step   # each needs one step for its one token
        request.prompt = [ord(token) for token in prompt.replace(" ", "")]
    found = []
    for p in run("prefix", requests, page_size=3).passes:
        [(_, computed_before, _)] = p.work
        found.append(computed_before // 3)
    return found

# %%
ask("5.5: Three prompts come, one after the other: 'abc uvw xyz j', 'abc xyz ghi j' and "
    "'uvw ghi abc j'. How many pages does each of them find? (a list: [.., .., ..])", guess=...)

# %%
ask("5.6: Then a prompt 'abc uvw ghi' comes, nine tokens that fill three cached pages. How many of "
    "its nine tokens are computed?", guess=...)

# %%
with folded():
    prompts = "abc uvw ghi j", "abc uvw xyz j", "abc xyz ghi j", "uvw ghi abc j", "abc uvw ghi"
    for prompt, pages in zip(prompts, pages_found(*prompts)):
        tokens = len(prompt.replace(" ", ""))
        print(f"{prompt:13} finds {pages} pages, computes {tokens - 3 * pages} of {tokens} tokens")

# %% [markdown]
# From when on can a page be found, and how long? Here is a pool of six pages of 4 tokens at three
# moments. A's prompt has 9 tokens, two full pages and one more token. B's prompt begins with the
# same 8 tokens.

# %% jupyter={"source_hidden": true}
def moment(scheduler):
    """The block tables and the free queue: [(page, whether it can be found), ...] of each."""
    lines = {f"{request.name}'s block table": request.block_table for request in scheduler.running}
    lines["the free queue"] = scheduler.pool.free_queue
    return {name: [(page, page in scheduler.pool.hash_of) for page in pages]
            for name, pages in lines.items()}

A, B = letters(A=9, B=11, new=1)
B.prompt[:8] = A.prompt[:8]
scheduler, moments = PrefixScheduler(8, 64, pages=6, page_size=4), {}
scheduler.add(A)
plan = scheduler.schedule(step=0)
moments["1. A's pass is planned"] = moment(scheduler)
scheduler.update(plan, tokens=[0])   # any token: it is A's last
moments["2. A has finished"] = moment(scheduler)
scheduler.add(B)
scheduler.schedule(step=1)
moments["3. B's pass is planned"] = moment(scheduler)
queues(moments);

# %% [markdown]
# 1. *It can be found before it is computed.* Pages 0 and 1 have their hashes as soon as the pass
#    that fills them is planned. A request that finds them now runs in the same pass, or in a later
#    one. In each layer, a pass writes all its keys before it reads any, so they are there in time.
#    Page 2 is not full, so it has no hash.
# 2. *It can be found while it is free.* All pages are in the queue, since no table names them. But
#    0 and 1 still hold their keys, and keep their hashes until somebody takes them. (Why the queue
#    has this order comes below.)
# 3. B finds 0 and 1, which leave the queue, wherever they stand in it. For the rest of its prompt B
#    takes the first page of the queue, which is 2.
#
# So equal prompts that come in one step share their pages at once:

# %%
source(PrefixScheduler.make_room)
twins = letters(A=24, B=24, new=2)
twins[1].prompt = twins[0].prompt
for p in run("prefix", twins, page_size=4).passes:
    print(f"step {p.step}:", *(f"{name} computes {n} after {first}" for name, first, n in p.work))

# %% [markdown]
# Now break it: what if a page were known by its own tokens alone, whatever comes before them?

# %%
first, later = texts("Return the value of this function if", " of this function is")
later.arrival = 9
for request in first, later:
    print(request.name, [word(request, i) for i in range(len(request.prompt))])
with broken("pages known by their own tokens"):
    check("prefix", [first, later], page_size=3)

# %% [markdown]
# B begins with the three tokens that fill A's second page, and it was given that page. But in A
# these tokens are at other positions, and each layer has mixed in what came before them. So their
# keys and values are different.
#
# ### Which pages are still needed?
#
# Two requests, 4 tokens to a page. B's prompt begins as A's does, so their tables are [0, 1, 2] and
# [0, 1, 3]: `ref_count` says how many tables each page is in. All four pages are full, and can be
# found. Then A finishes.

# %% jupyter={"source_hidden": true}
six, A, B = PrefixPool(6, 4), [], []   # six pages of 4 tokens
six.allocate(A, 3)
six.share(B, A[:2])
six.allocate(B, 1)
for page in range(4):
    six.register(page, f"hash of page {page}")
print("A:", A, " B:", B, " ref_count:", six.ref_count, " free queue:", [*six.free_queue])
six.free(A)

# %%
ask("5.7: Pages 4 and 5 have been free all the time. Which pages have become free now? (a list)",
    guess=...)

# %% [markdown]
# A request that needs a page takes the first of the free queue. If that page could be found, it no
# longer can: it is *evicted*. So the order of the queue decides what is kept, and `free` has three
# rules for it:
#
# 1. A page that comes back goes to the *end*. So the page that has been free the longest is taken
#    first.
# 2. A table's *last* page comes back first. A page is found only by way of all pages before it. So
#    the first page is worth most, as without it the others cannot be found, and it is kept longest.
# 3. A page without a hash goes to the *front* of the queue: nobody can find it, so nothing is lost
#    if it is taken first.

# %%
six.free(B)
ask("5.8: Now B finishes, too. In which order will the six pages be taken? (a list)", guess=...)

# %% [markdown]
# ### Your turn: freeing pages
#
# A request is done with its block table. `ref_count[page]` is the number of tables that a page is
# in, and `free_queue`, a deque, has the free pages in the order in which they will be taken. Change
# both, the count first, and leave `table` as it is. `hash_of`, a dict, has the pages that can be
# found.

# %% tags=["exercise"]
@exercise
def free(table, ref_count, free_queue, hash_of):
    """Takes the pages of a table out of use; returns nothing."""
    ...

# %% [markdown]
# ### A whole run
#
# Here is the pool of a run, step by step, with pages of 4 tokens. One request arrives at each step,
# at most five run at a time, and all eight prompts begin with the same 20 tokens: the five dark
# pages. A letter in a page says who alone holds it from this step on: either it has just taken the
# page, and what was cached in it is evicted, or all others that shared the page have ended.

# %%
pool(filling_pool(model));

# %% [markdown]
# A has ended at step 14. Why does G take its pages 24 and 19 then, and H its pages 6 and 5 later?
# <details><summary>Answer</summary>
#
# A's table ends with 5, 6, 9, 19 and 24, and its last page is freed first, so 24 is the first of
# them in the queue, and 5 the last: it is the one that continues the common beginning.</details>
#
# A preempted request may find its own pages again, too, if no other request has taken them.
#
# What it costs to read through a block table is in [docs/memory.md](../docs/memory.md).
#
# ## A question
#
# What are the advantages of larger pages, and of smaller ones?
# <details><summary>Answer</summary>
#
# Small pages waste less in each request's last page and share more of a common prefix. Large pages
# mean shorter tables, fewer lookups and longer contiguous reads. 16 tokens is a common choice.
# </details>
#
# <details><summary>Claims of published texts that were met here</summary>
#
# *Holds:* full pages of a prompt are reused by later requests that begin alike (I7 of
# [docs/sources.md](../docs/sources.md)). We cache pages of generated tokens, too.</details>
#
# **Next:** [06_cost](06_cost.ipynb) turns the counts into time.
