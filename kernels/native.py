"""
Builds, loads and calls native.cpp: a whole forward pass of a flat stream in one call, in float32 on
a CPU. That needs g++, and results that agree with torch's. Elsewhere everything runs through torch.

The compiler is called once, for two seconds, and what it builds stays in kernels/build/. It has no
threads of its own but uses those of torch's OpenMP: two sets of threads on the same cores would
slow each other down.
"""
import ctypes
import hashlib
import mmap
import os
import subprocess
from functools import cache
from itertools import chain
from pathlib import Path

import torch
from torch.nn import functional as F

from kernels.threads import threads
from model import GPT, GPTConfig

PARTS = "blocks' multiplications", "attention", "norms", "vocabulary"
SECONDS = (ctypes.c_double * len(PARTS))()   # what all steps so far have spent on each

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp",
         "-fno-math-errno", "-fno-trapping-math"]   # these let exp() become vector instructions


# --- building and loading -------------------------------------------------------------------------

@cache
def library():
    """The loaded library, or None where it cannot be built."""
    try:
        loaded = ctypes.CDLL(build())
    except (OSError, subprocess.SubprocessError):   # no compiler, no OpenMP, a read-only folder
        return None
    number, address = ctypes.c_int64, ctypes.c_void_p
    loaded.panel_width.restype, loaded.multiply.restype, loaded.step.restype = number, None, None
    loaded.multiply.argtypes = [address, number, *[address] * 3, *[number] * 5]
    loaded.step.argtypes = [*[address] * 4, number, address, *[number] * 2, *[address] * 2, number,
                            address]
    return loaded


def build():
    """The path of the shared library for this source, compiler and processor."""
    machine = subprocess.run(["g++", "-march=native", "-dM", "-E", "-x", "c++", os.devnull],
                             capture_output=True, check=True, timeout=60).stdout
    digest = hashlib.sha256(SOURCE.read_bytes() + machine + repr(FLAGS).encode()).hexdigest()
    path = SOURCE.with_name("build") / f"native-{digest[:16]}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        part = path.with_name(str(os.getpid()))
        # Two calls, so that no OpenMP is linked: its functions are found in what torch has loaded.
        for arguments in ([*FLAGS, "-c", SOURCE, "-o", f"{part}.o"],
                          ["-shared", f"{part}.o", "-o", f"{part}.so"]):
            subprocess.run(["g++", *arguments], capture_output=True, check=True, timeout=120)
        os.remove(f"{part}.o")
        os.replace(f"{part}.so", path)   # in one piece: several processes may build it
    return str(path)


@cache
def works():
    """Whether the library is there and computes what torch computes, on two small problems."""
    if library() is None:
        return False
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=random) for shape in ((11, 7), (60, 7), (60,)))
    found = [(multiply(x, pack(weight), 60, bias, gelu=True),
              F.gelu(F.linear(x, weight, bias), approximate="tanh"))]
    config = GPTConfig(block_size=40, vocab_size=50, n_layer=2, n_head=2, n_embd=20)
    with torch.no_grad():
        plain, fast = GPT(config), GPT(config)
        for p in plain.parameters():
            p.copy_(torch.randn(p.shape, generator=random) / 4)
        fast.load_state_dict(plain.state_dict())
        fast.room = torch.empty   # what a FastGPT has, as far as `step` wants it
        for module in (fast.wte, *chain.from_iterable(map(linears, fast.h))):
            module.reordered = cache(pack)
        prompts = torch.arange(37), torch.arange(40, 45)
        size = config.n_embd // config.n_head
        keys, values = torch.full((2, config.n_layer, config.n_head, 60, size), torch.nan)
        pieces = [(0, 37, 0, 1, [3]), (37, 5, 0, 1, [50])]
        logits = step(fast, torch.cat(prompts), torch.cat([torch.arange(37), torch.arange(5)]),
                      [(*piece, keys.data_ptr(), values.data_ptr(), 60) for piece in pieces], 40)
        found += [(mine, plain(prompt)[-1]) for mine, prompt in zip(logits, prompts)]
    return all(torch.allclose(mine, theirs, rtol=0, atol=1e-4) for mine, theirs in found)


# --- calling --------------------------------------------------------------------------------------

def huge_pages(tensor):
    """
    Asks Linux for pages of 2 MB for a new tensor, and returns it. A step reads hundreds of
    megabytes, each once. With pages of 4 KB, finding them takes a quarter of attention's time.
    """
    size, advice = 2**21, getattr(mmap, "MADV_HUGEPAGE", None)
    first = -(-tensor.data_ptr() // size) * size
    end = (tensor.data_ptr() + tensor.nbytes) // size * size
    if advice is not None and tensor.device.type == "cpu" and first < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)
    return tensor


def pack(weight):
    """A weight (n, k) in the order in which it is read: (panels, k, columns of a panel)."""
    width = library().panel_width()
    n, k = weight.shape
    packed = huge_pages(weight.new_empty(-(-n // width), k, width))
    return packed.copy_(F.pad(weight, (0, 0, 0, -n % width)).view(-1, width, k).mT)


def multiply(x, packed, n, bias=None, gelu=False):
    """x (..., k) times a packed weight (n, k), plus bias (n,), perhaps through GELU: (..., n)."""
    k = x.size(-1)
    rows = x.reshape(-1, k)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    y = x.new_empty(*x.shape[:-1], n)
    library().multiply(
        rows.data_ptr(), rows.stride(0), packed.data_ptr(), bias.data_ptr() if bias is not None
        else None, y.data_ptr(), rows.size(0), k, n, gelu, torch.get_num_threads())
    return y


def linears(block):
    attn, mlp = block.attn, block.mlp
    return attn.query, attn.key, attn.value, attn.c_proj, mlp.c_fc, mlp.c_proj


def can_step(model):
    """Whether `step` can run this FastGPT: float32 on a CPU, with all its layers, no gradients."""
    weight, head = model.wte.weight, model.wte.reordered
    return (head.compiled and head.serves(weight)
            and not (torch.is_grad_enabled() and weight.requires_grad)
            # tensor parallel ranks add up in the middle of a block
            and all(hasattr(linear, "reordered") for block in model.h for linear in linears(block)))


def step(model, tokens, positions, pieces, page):
    """
    A whole forward pass of a FastGPT in one call. tokens, positions: long (N,). Returns the logits
    (R, V) of the last token of each piece that wants them.

    pieces: for each request (its first token in the stream, their number, position of the first,
            whether the logits of the last are wanted, block table, address of the pool's keys, of
            its values, slots in the pool). A block table lists the slots at which pages begin.
    page:   tokens in a page
    """
    def norm(module):
        return module.weight.data_ptr(), module.bias.data_ptr()

    def matrix(module):
        return module.reordered(module.weight).data_ptr(), module.bias.data_ptr()

    layers = []   # addresses, in the order of `struct Layer`
    for block in model.h:
        query, key, value, c_proj, c_fc, c_proj_2 = map(matrix, linears(block))
        layers += [*norm(block.ln_1), *query, *key, *value, *c_proj,
                   *norm(block.ln_2), *c_fc, *c_proj_2]
    config, N, head = model.config, len(tokens), model.wte.reordered(model.wte.weight)
    whole = [config.n_layer, config.n_head, config.n_embd, 4 * config.n_embd, config.vocab_size,
             model.wte.weight.data_ptr(), model.wpe.weight.data_ptr(), *norm(model.ln_f),
             head.data_ptr(), 0]
    tables = numbers(slot for piece in pieces for slot in piece[4])
    address, lines = ctypes.addressof(tables), []
    for first, n, start, wanted, table, *pool in pieces:
        lines += [first, n, start, wanted, address, *pool]
        address += 8 * len(table)
    room = model.room(9 * config.n_embd * N)
    logits = room.new_empty(sum(piece[3] for piece in pieces), config.vocab_size)
    with threads.chosen() as count:
        library().step(numbers(whole), numbers(layers), tokens.data_ptr(), positions.data_ptr(), N,
                       numbers(lines), len(pieces), page, room.data_ptr(), logits.data_ptr(), count,
                       SECONDS)
    return logits


def numbers(values):
    values = list(values)
    return (ctypes.c_int64 * len(values))(*values)
