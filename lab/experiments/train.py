"""
Trains the built-in model on Python's own documentation; allow ten minutes on two cores.

    python -m lab.experiments train                       # writes out/: ranks file and weights
    python generate_naive.py --model out

Nothing is downloaded. The script trains the tokenizer and a model of 4 layers with 4 heads each;
toolbox/builtin holds the result of such a run, and prompts from the held-out texts.

The model's output is fluent nonsense; it exists only as a workload.
"""
import base64
import math
import random
from pathlib import Path
from statistics import mean

import torch
from torch.nn import functional as F

from lab.experiments.corpus import documents
from lab.loading.tokenizer import byte_of, from_ranks
from model import GPT, GPTConfig
from toolbox.validate import at_least_1, one_line
from toolbox.weights import write_gpt2

N_TOKENS = 1023   # of the tokenizer, without <|endoftext|>
BATCH_SIZE = 8
FLAGS = {"--out": dict(default="out", help="folder for the result"),
         "--steps": dict(type=int, default=4000)}


def train_ranks(texts, n_tokens):
    """
    Trains a byte-level BPE of `n_tokens` tokens on `texts`, with Hugging Face's tokenizers (a
    development requirement), and returns it as tiktoken's ranks, bytes -> rank.
    """
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise ValueError("this needs tokenizers: pip install -r tests/requirements.txt") from None
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)   # same as PATTERN
    trainer = trainers.BpeTrainer(vocab_size=n_tokens, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(texts, trainer)
    table, ranks = byte_of(), {bytes([b]): b for b in range(256)}
    vocabulary = bpe.get_vocab()
    for token in sorted(vocabulary, key=vocabulary.get):   # in the order of the merges
        ranks.setdefault(bytes(table[c] for c in token), len(ranks))
    return ranks


def get_batch(docs, block_size, rng):
    """
    (x, y) of shape (B, T). Each row is a sequence of random documents that begins at the start of
    one, as every prompt does.
    """
    rows = []
    for _ in range(BATCH_SIZE):
        row = []
        while len(row) < block_size + 1:
            row += rng.choice(docs)
        rows.append(row[:block_size + 1])
    tokens = torch.tensor(rows)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, x, y):
    """Mean cross-entropy in nats per token."""
    # as model.causal, by torch's kernel, whose backward pass is fast
    logits = model(x, attend=lambda layer, q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True))
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def train(args):
    """Trains the built-in model on Python's own documentation; ten minutes on two cores."""
    at_least_1(**{"--steps": args.steps})
    out = Path(args.out)
    with one_line(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
    texts, held_out = split_documents()
    ranks = train_ranks(texts, N_TOKENS)
    encoding = from_ranks(ranks, "builtin")
    write_ranks(ranks, out / "ranks.tiktoken")
    docs, val = encoded(encoding, texts), encoded(encoding, held_out)
    print(f"{len(docs)} documents of {sum(map(len, docs)):,} tokens, {len(val)} held out")
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=256, vocab_size=encoding.n_vocab,
                          n_layer=4, n_head=4, n_embd=128))
    rng = random.Random(0)
    take_steps(model, docs, rng, args.steps)
    print(f"validation loss {validation_loss(model, val, rng):.3f}")
    write_gpt2(model, out)   # GPT.from_pretrained reads it
    print(f"wrote {out}: try  python generate_naive.py --model {out}")
    return 0


def split_documents():
    """(texts to train on, one in twenty that is held out)"""
    texts = [f"# {title}\n{body}" for title, body in documents()]
    random.Random(0).shuffle(texts)
    held_out = len(texts) // 20
    return texts[held_out:], texts[:held_out]


def write_ranks(ranks, path):
    """As tiktoken has them: a line for each token, in base64, and its rank."""
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    path.write_bytes(b"".join(lines))


def encoded(encoding, texts):
    return [tokens + [encoding.eot_token] for tokens in encoding.encode_ordinary_batch(texts)]


def optimizer_of(model, steps):
    """(AdamW with weight decay for matrices only, its schedule: a warm-up, then a cosine)"""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                                   {"params": vectors, "weight_decay": 0.0}],
                                  lr=3e-3, betas=(0.9, 0.99))

    def share_of_rate(step):
        warm_up = (step + 1) / 100
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
        return min(warm_up, cosine)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate)


def take_steps(model, docs, rng, steps):
    optimizer, schedule = optimizer_of(model, steps)
    for step in range(1, steps + 1):
        x, y = get_batch(docs, model.config.block_size, rng)
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step:5d}/{steps}  loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def validation_loss(model, docs, rng):
    losses = []
    for _ in range(20):
        losses.append(loss_of(model, *get_batch(docs, model.config.block_size, rng)).item())
    return mean(losses)
