"""
Builds and loads native.cpp, where that is possible: g++ is found, and what it builds agrees with
torch. Elsewhere everything runs through torch's own kernels.

The compiler is called once, for one or two seconds, and its result stays in kernels/build/. The
library has no threads of its own: it uses those of torch's OpenMP, because two sets of threads
that spin on the same cores would slow each other down.
"""
import ctypes
import hashlib
import mmap
import os
import subprocess
import time
from functools import cache
from pathlib import Path

import torch
from torch.nn import functional as F

from kernels.threads import threads

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp",
         "-fno-math-errno", "-fno-trapping-math"]   # lets exp() become vector instructions


@cache
def native():
    """The loaded library, or None."""
    try:
        library = ctypes.CDLL(build())
    except (OSError, subprocess.SubprocessError):   # no compiler, no OpenMP, a read-only folder
        return None
    number, address = ctypes.c_int64, ctypes.c_void_p
    library.multiply.argtypes = [address, number, *[address] * 3, *[number] * 5]
    library.step.argtypes = [*[address] * 4, number, address, number, number, address, address, number]
    library.multiply.restype = library.step.restype = None
    library.panel_width.restype = number
    return library if agrees(library) else None


def build():
    """The path of the shared library for this source, compiler and processor."""
    machine = subprocess.run(["g++", "-march=native", "-dM", "-E", "-x", "c++", os.devnull],
                             capture_output=True, check=True, timeout=60).stdout
    digest = hashlib.sha256(SOURCE.read_bytes() + machine + repr(FLAGS).encode()).hexdigest()
    folder = SOURCE.with_name("build")
    path = folder / f"native-{digest[:16]}.so"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        part = folder / f"{os.getpid()}"
        # Two calls, so that OpenMP is not linked: its functions are found in what torch has loaded.
        subprocess.run(["g++", *FLAGS, "-c", SOURCE, "-o", f"{part}.o"],
                       capture_output=True, check=True, timeout=120)
        subprocess.run(["g++", "-shared", f"{part}.o", "-o", f"{part}.so"],
                       capture_output=True, check=True, timeout=120)
        os.remove(f"{part}.o")
        os.replace(f"{part}.so", path)   # in one piece, if several processes build it
    return str(path)


def huge_pages(tensor):
    """
    Asks Linux for pages of 2 MB for a new tensor, and returns it. Whoever reads many megabytes for
    each token waits for the table of 4 KB pages as well: attention takes a third longer with them.
    """
    size, advice = 2**21, getattr(mmap, "MADV_HUGEPAGE", None)
    first, end = -(-tensor.data_ptr() // size) * size, (tensor.data_ptr() + tensor.nbytes) // size * size
    if advice is not None and tensor.device.type == "cpu" and first < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)
    return tensor


def serves(*tensors):
    """Whether the library can be called with these tensors: float32 on a CPU."""
    return (all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
            and native() is not None)


def pack(weight, library=None):
    """A weight (n, k) in the order in which `multiply` reads it: (panels, k, columns of a panel)."""
    width = (library or native()).panel_width()
    n, k = weight.shape
    packed = huge_pages(weight.new_empty(-(-n // width), k, width))
    return packed.copy_(F.pad(weight, (0, 0, 0, -n % width)).view(-1, width, k).mT)


def multiply(x, packed, n, bias=None, gelu=False, library=None):
    """x (..., k) times a packed weight (n, k), plus bias (n,), perhaps through GELU: (..., n)."""
    k = x.size(-1)
    rows = x.reshape(-1, k)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    y = x.new_empty(*x.shape[:-1], n)
    (library or native()).multiply(
        rows.data_ptr(), rows.stride(0), packed.data_ptr(), None if bias is None else bias.data_ptr(),
        y.data_ptr(), rows.size(0), k, n, gelu, torch.get_num_threads())
    return y


def can_step(model):
    """Whether `step` can run this GPT: float32 on a CPU, all its layers whole, and no gradients."""
    weight = model.wte.weight
    whole = all(hasattr(block.attn.c_proj, "reordered") and hasattr(block.mlp.c_proj, "reordered")
                for block in model.h)   # a tensor parallel rank adds up in the middle of a block
    return whole and serves(weight) and not (torch.is_grad_enabled() and weight.requires_grad)


def step(model, tokens, positions, pieces, page):
    """
    A whole forward pass of a FastGPT in one call: tokens and positions long (N,) -> logits (R, V) of
    the pieces that want them. pieces: (first token, number, position of the first, wanted, table,
    address of the keys, of the values, slots) of each request; a table is a list of slots.
    """
    def norm(module):
        return module.weight.data_ptr(), module.bias.data_ptr()

    def matrix(module):
        return module.reordered(module.weight).data_ptr(), module.bias.data_ptr()

    layers = []
    for block in model.h:
        attn, mlp = block.attn, block.mlp
        layers += [*norm(block.ln_1), *matrix(attn.query), *matrix(attn.key), *matrix(attn.value),
                   *matrix(attn.c_proj), *norm(block.ln_2), *matrix(mlp.c_fc), *matrix(mlp.c_proj)]
    config, N, head = model.config, len(tokens), model.wte.reordered(model.wte.weight)
    whole = [config.n_layer, config.n_head, config.n_embd, 4 * config.n_embd, config.vocab_size,
             model.wte.weight.data_ptr(), model.wpe.weight.data_ptr(), *norm(model.ln_f),
             head.data_ptr(), 0]
    tables = numbers(slot for piece in pieces for slot in piece[4])
    address, lines = ctypes.addressof(tables), []
    for first, n, start, wanted, table, *pool in pieces:
        lines += [first, n, start, wanted, address, *pool]
        address += 8 * len(table)
    room = model.room(N * 9 * config.n_embd)
    logits = room.new_empty(sum(piece[3] for piece in pieces), config.vocab_size)
    most = torch.get_num_threads()
    used, start, cpu = threads.number(most), time.perf_counter(), time.process_time()
    native().step(numbers(whole), numbers(layers), tokens.data_ptr(), positions.data_ptr(), N,
                  numbers(lines), len(pieces), page, room.data_ptr(), logits.data_ptr(), used)
    threads.record(used, most, time.perf_counter() - start, time.process_time() - cpu)
    return logits


def numbers(values):
    values = list(values)
    return (ctypes.c_int64 * len(values))(*values)


def agrees(library):
    """Whether it multiplies as torch does."""
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=random) for shape in ((11, 7), (60, 7), (60,)))
    y = multiply(x, pack(weight, library), 60, bias, gelu=True, library=library)
    expected = F.gelu(F.linear(x, weight, bias), approximate="tanh")
    return torch.allclose(y, expected, rtol=0, atol=1e-5)
