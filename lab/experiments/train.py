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

    # 1. text, of which one document in twenty is held out, and tokenizer
    all_texts = [f"# {title}\n{body}" for title, body in documents()]
    random.Random(0).shuffle(all_texts)
    held_out, texts = all_texts[:len(all_texts) // 20], all_texts[len(all_texts) // 20:]
    ranks = train_ranks(texts, N_TOKENS)
    encoding = from_ranks(ranks, "builtin")
    (out / "ranks.tiktoken").write_bytes(b"".join(
        base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    docs, val = ([tokens + [encoding.eot_token] for tokens in encoding.encode_ordinary_batch(each)]
                 for each in (texts, held_out))
    print(f"{len(docs)} documents of {sum(map(len, docs)):,} tokens, {len(val)} held out")

    # 2. model and optimizer; weight decay for matrices only
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=256, vocab_size=encoding.n_vocab,
                          n_layer=4, n_head=4, n_embd=128))
    optimizer = torch.optim.AdamW([
        {"params": [p for p in model.parameters() if p.dim() == dim], "weight_decay": decay}
        for dim, decay in ((2, 0.1), (1, 0.0))], lr=3e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(
        (step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / args.steps)))   # warm-up, cosine

    # 3. train
    rng = random.Random(0)
    for step in range(args.steps):
        x, y = get_batch(docs, model.config.block_size, rng)
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1:5d}/{args.steps}  loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        nats = mean(loss_of(model, *get_batch(val, model.config.block_size, rng)).item()
                    for _ in range(20))
    print(f"validation loss {nats:.3f}")

    # 4. the result, which GPT.from_pretrained reads
    write_gpt2(model, out)
    print(f"wrote {out}: try  python generate_naive.py --model {out}")
    return 0
