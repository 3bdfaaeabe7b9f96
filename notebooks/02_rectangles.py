# %% [markdown]
# # 2. Rectangles
#
# One request alone leaves the machine idle: a forward pass reads all weights, whether it computes
# one row or thirty. So let us compute several requests at once: prompts of different lengths in one
# tensor, with the padding on the left, and the right position for every token. Then we count three
# kinds of waste.

# %%
from lesson import ask, broken, check, counts, eight_requests, folded, letters, look, run
from lesson import run_all, show, sizes, source, texts, timelines, tokenizer, word
from exercises import exercise
import torch
from generate_dynamic import Rectangle, admit, still_running
from model import Head

requests = texts("Return the value of this function if", "The class", "Return True if the")
for request in requests:
    print(request.name, [word(request, i) for i in range(len(request.prompt))])

# %% [markdown]
# ## One tensor for three prompts
#
# A tensor has one width, so the shorter prompts are filled up with *pads*: slots that hold no
# token. The stage *naive*, `generate_naive.py`, puts them on the left. This is the tensor of its
# first forward pass, where a dot is a pad. (A slot cannot be empty: each pad holds a copy of its
# row's first token, which nothing may see.)

# %%
prefill = look("naive", requests, step=0)
for pads, row in zip(prefill.batch.pads.tolist(), prefill.batch.tokens.tolist()):
    words = ["·"] * pads + [tokenizer.decode([token]).strip() for token in row[pads:]]
    print("".join(f"{word:10}" for word in words))

# %% [markdown]
# No token may look at a pad. So the causal rule is joined by a padding mask. This is what the X-ray
# measured in that forward pass. Each panel is one row of the tensor, one request:

# %%
show({"naive, step 0": prefill}, label=word);

# %% [markdown]
# ### Break it: no padding mask
#
# Is this mask needed, if the causal rule is there anyway? Here is the same batch without it: each
# slot sees its own row up to itself, and only the causal rule hides anything.

# %%
ask("2.1: Without the padding mask, which of A, B and C still pass the check?", guess=...)

# %%
with folded(), broken("no padding mask"):
    check("naive", requests)
    show({"naive without its padding mask": look("naive", requests, step=0)}, label=word)

# %% [markdown]
# The causal rule cannot help: it hides what comes *after* a token, and the pads come *before* it.
# So each token of B and C sees all pads of its row. To the softmax a pad's key is a key like any
# other. It takes a share of the weight, and the pad's value is mixed into the token's output.
#
# What of a pad does the harm? Here is one head, with two pads in slots 0 and 1, and three tokens in
# slots 2 to 4. The pads get another query, or another key. Which tokens' outputs change?

# %%
def changed_tokens(what, mask):
    """The tokens whose output changes if the pads' q, k or v (`what`) is another one."""
    before = {name: torch.randn(5, 8) for name in "qkv"}
    after = before | {what: torch.cat([torch.randn(2, 8), before[what][2:]])}
    first, second = (Head()(*qkv.values(), mask=mask) for qkv in (before, after))
    return [slot for slot in (2, 3, 4) if not torch.allclose(first[slot], second[slot])]

no_pads = torch.arange(5) >= 2   # True where a key may be seen
for title, mask in ("with the padding mask", no_pads), ("without it", None):
    print(f"{title:21}  another query changes {changed_tokens('q', mask)}, "
          f"another key {changed_tokens('k', mask)}")

# %% [markdown]
# A pad's own *query* never matters. It decides what the pad's own output is made of, and nobody
# reads that: its logits are not used. (The next layer makes the pad's key and value of it, but the
# mask hides these again.) So a pad's row is hatched in the pictures, whatever it sees. A pad's
# *key* matters as soon as a token sees it. So a padding mask closes columns, not rows.
#
# ## Why on the left?
#
# After the prefill, each row needs the logits of its last token. With the padding on the left,
# these tokens are all in the last column, so the code reads that one in every step.
#
# Here is the same batch padded on the right. The mask hides the pads there, the positions are
# right, and every later token goes where it belongs, into a new column. Nothing else is changed in
# the code. (Unfolded, the cell below the question also shows the lines that change. You need not
# read them.)

# %%
ask("2.2: A, B and C get up to 8 tokens each. With the padding on the right, how many tokens of "
    "all three are read from the logits of a pad?", guess=...)

# %%
with folded(), broken("right padding"):
    check("naive", requests)

# %%
with broken("right padding", show=False):
    right_padded = look("naive", requests, step=0)
show({"padded on the right": right_padded}, label=word);

# %% [markdown]
# A key that is seen and should not be would be red. There is no red in this picture: every token
# sees what it should, and yet B and C are wrong, because the wrong column was read. So we keep two
# witnesses. The X-ray says which token sees which; the check compares logits and tokens with the
# request run alone.
#
# ## Which position?
#
# The model adds an embedding for each position. In a left-padded row the token in column 5 may be
# the row's first. Its position is 0 then, not 5.

# %%
print(prefill.positions)

# %% [markdown]
# (A pad's position is arbitrary. Ours are set to 0.)
#
# ### Your turn: positions from pads
#
# `columns` are the numbers of the columns that this pass computes: 0 to T − 1 for the prompts,
# later only the newest one. `pads` says how many pads each row has on its left. Return every slot's
# position: columns [0, 1, 2] and pads [0, 1] give [[0, 1, 2], [-1, 0, 1]]. A pad's position may
# stay negative: our code sets it to 0 afterwards.

# %% tags=["exercise"]
@exercise
def own_positions(columns, pads):
    """columns (T,), pads (B,) -> (B, T): the position of each slot in its own request."""
    ...

# %% [markdown]
# ### Break it
#
# Suppose that the position were simply the column. Five prompts have 4, 7, 4, 2 and 2 tokens. C is
# the same text as A, and E the same as D. *Naive* takes two at a time: A with B, then C with D,
# then E.

# %% jupyter={"source_hidden": true}
five = texts("Return True if the", "If this function is called without", "Return True if the",
             "The class", "The class")

# %%
ask("2.3: Positions are columns. Which of A, B, C, D and E still pass the check?", guess=...)

# %%
right = run("naive", five, max_batch=2).requests
with folded(), broken("static column positions"):
    check("naive", five, max_batch=2)
    for instead, of in zip(run("naive", five, max_batch=2).requests, right):
        print(f"{tokenizer.decode(instead.tokens)!r}\n    instead of "
              f"{tokenizer.decode(of.tokens)!r}")

# %% [markdown]
# No error is raised: every mask of the right shape is valid input, and the softmax makes weights of
# whatever it leaves. And the texts look no worse than the right ones.
#
# ## Waste, first kind: padding
#
# A prompt of 10 tokens beside one of 30: what does its row cost?

# %%
alone = run("naive", letters(A=10)).passes[0]
padded = run("naive", letters(A=10, B=30)).passes[0]
print(f"slots: {padded.shape} = {padded.slots}, for 40 tokens: {padded.slots / 40} times as many")
print(f"scores of A's row: {padded.score_entries // 2}; alone: {alone.score_entries}")

# %% [markdown]
# ## Waste, second kind: finished rows
#
# A static batch starts together and ends together. Three requests want 2, 5 and 10 tokens. (The
# prefill gives each its first one, so 10 tokens take 10 steps.)

# %%
uneven = letters(A=3, B=3, C=3, new={"A": 2, "B": 5, "C": 10})

# %%
ask("2.4: The batch runs until the last request has its 10 tokens. How many slots does it "
    "compute for rows that are already finished?", guess=...)

# %%
with folded():
    timelines([run("naive", uneven)], columns=1)

# %% [markdown]
# ## Waste, third kind: waiting
#
# No new request gets in before the last one is done. Here are eight requests, four at a time. Look
# at the thin lines: these requests wait although some rows hold only finished requests.

# %%
eight = eight_requests()
sizes(eight)
timelines([run("naive", eight, max_batch=4)], columns=1);

# %% [markdown]
# ## Dynamic batching: a new batch at every step
#
# The way out is to ask at every step which requests are finished and which may start. The stage
# *dynamic* does so. These two functions are all of its scheduling. (`kv_capacity` is the room that
# a request needs at most: its prompt and its longest answer, but for one token. The last token of
# an answer is never computed: no token comes after it, so nobody needs its key. A prompt of 4 and
# an answer of 9 need 4 + 9 - 1 = 12.)

# %%
source(still_running)
source(admit)
timelines([run("dynamic", eight, max_batch=4)], columns=1);

# %% [markdown]
# The rectangle is a new one in every step, so each request has a cache of its own. The pasts are
# copied from there into a rectangle, left-padded as well, and the new tokens come after them.
# (`plan` lists each request with the number of its new tokens. `starts` says how many of its tokens
# are cached, and P is the longest of these; T is the largest number of new tokens. `head` puts the
# past before the new keys, and `self.mask` hides the pads in both. The zeros (`new_zeros`, and
# `masked_fill` with `hidden`) are a precaution for pads whose numbers have overflowed: you may skip
# these lines.)

# %%
source(Rectangle.attend)

# %% [markdown]
# Here is a step in which B and C decode with pasts of different lengths, and D, which has taken the
# place of A, computes its prompt. Prompts and decodes differ in width, so there are two forward
# passes:

# %%
newcomer = letters(A=5, B=2, C=4, D=6, new={"A": 1, "B": 6, "C": 6, "D": 2})
show({"decodes": look("dynamic", newcomer, step=1, number=0, max_batch=3),
      "prompts": look("dynamic", newcomer, step=1, number=1, max_batch=3)});

# %% [markdown]
# There is padding among the cached keys now, because B has computed fewer tokens than C. These
# slots are masked like all other pads.
#
# Now the bug of question 2.3 in *dynamic*: a token's position is its column, counted through past
# and new slots. These are all rectangles, a line each. A:4 says that A's row has 4 tokens, its past
# included:

# %% jupyter={"source_hidden": true}
for p in run("dynamic", eight, max_batch=4).passes:
    print(f"step {p.step:2}:", *(f"{name}:{first + n}" for name, first, n in p.work))

# %%
ask("2.5: Which of the eight requests pass the check with this bug?", guess=...)

# %%
with folded(), broken("column positions"):
    check("dynamic", eight, max_batch=4)

# %% [markdown]
# ## The bill

# %%
counts(run_all(("unbatched", "naive", "dynamic"), eight, max_batch=4), slots="slots",
       padding="pad_slots", finished="finished_slots", copied_bytes="copied_bytes")

# %% [markdown]
# Batching makes far fewer passes, and it pays for that with padding. Dynamic batching has no
# finished rows, but it copies the pasts. And it has a new problem, which the timeline cannot show,
# because it draws all steps equally wide: step 6 computes F's prompt of 40 tokens in one piece, and
# A, C and E wait that long for their next tokens. Notebook 3 solves it.
#
# **Turn this knob.** Run the bill again with `max_batch=2`, and with 8. Predict first: which counts
# of *dynamic* grow with the batch, and which one shrinks?
# <details><summary>Answer</summary>
#
# Passes shrink, from 36 to 17. Padding grows, from 5 slots to 27, since more lengths meet; and so
# do the copied bytes, from 6,737,920 to 10,539,008, since all pasts are padded to the longest.
# </details>
#
# ## A question
#
# *Dynamic* copies every past at every step, so a token that stays for 100 steps is copied
# 100 times. Why not keep the rectangle of pasts and write into it?
# <details><summary>Answer</summary>
#
# One can, as long as no request leaves or arrives. But a newcomer with a longer prompt widens the
# rectangle for all of them, and a request that leaves makes a hole. *Ragged* drops the rectangle
# instead, and *paged* shows where the keys can live then.</details>
#
# <details><summary>Claims of published texts that were met here</summary>
#
# *Wrong as published:* linear layers do twice the work for 10 tokens beside 30. They compute 60
# slots for 40 tokens, 1.5 times as many (R1 of [docs/sources.md](../docs/sources.md)).
#
# *Hold:* pad on the left, so that the next token comes from the last column (H7); a static batch
# wastes every step of a finished row (H8).</details>
#
# **Next:** [03_chunks_and_fusion](03_chunks_and_fusion.ipynb) cuts the long prompts into pieces.
